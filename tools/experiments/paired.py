"""Statistics of the results pages: Student's t for paired differences, Holm's correction."""
import math


def mean(xs):
    xs = [x for x in xs if x is not None]
    return sum(xs) / len(xs) if xs else None


def deviation(xs):
    """Standard deviation of a sample; 0 for one value."""
    m = mean(xs)
    return (sum((x - m) ** 2 for x in xs) / (len(xs) - 1)) ** 0.5 if len(xs) > 1 else 0.0


def inside(t, freedom):
    """Probability that |T| < t for Student's T, in closed form for integer degrees of freedom (Abramowitz and Stegun,
    26.7.3 and 26.7.4)."""
    angle = math.atan2(t, math.sqrt(freedom))
    cosine, odd = math.cos(angle), freedom % 2
    term = cosine if odd else 1.0
    total = 0.0
    for k in range(3 if odd else 2, freedom + 1, 2):
        total += term
        term *= cosine**2 * (k - 1) / k
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def quantile(freedom, level=0.95):
    """The t with inside(t) = level, by bisection."""
    low, high = 0.0, 1e4
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if inside(middle, freedom) < level else (low, middle)
    return low


def interval(differences):
    """Mean, half the width of its 95 % interval, and the two-sided p of a mean of 0; None for fewer than two pairs."""
    n = len(differences)
    if n < 2:
        return None
    m, error = mean(differences), deviation(differences) / n**0.5
    if error == 0:
        return m, 0.0, 1.0 if m == 0 else 0.0
    return m, quantile(n - 1) * error, 1 - inside(abs(m) / error, n - 1)


def holm(ps):
    """Holm's step-down correction: the i-th smallest of n, times n - i, never below the one before it."""
    corrected, largest = [0.0] * len(ps), 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=ps.__getitem__)):
        largest = max(largest, min(1.0, ps[i] * (len(ps) - rank)))
        corrected[i] = largest
    return corrected
