"""Finds places of a C++ source that can be changed, and writes a copy in which each change waits for its number."""
import hashlib
import re
from dataclasses import dataclass, field

ON = "::pare::mutant::on"
# Of each rule, the part in a thousand of its mutants that are taken: so many that a run is a matter of minutes.
RATES = {"guard dropped": 60, "never": 35, "always": 20, "operand dropped": 50, "bound": 35, "last skipped": 30,
         "equality": 15, "sign": 50, "factor dropped": 45, "divisor dropped": 125, "limit dropped": 100,
         "sum restarts": 125, "constant": 12, "named constant": 60, "statement dropped": 17, "field at its default": 30,
         "arguments swapped": 30, "metric one higher": 125, "metric negated": 100, "choice": 25, "other stream": 1000,
         "part of a key dropped": 500}


@dataclass
class Mutant:
    file: str
    line: int
    text: str  # of the line
    label: str
    edits: list = field(default_factory=list)  # (first, last + 1, before, after), with {n} for the number
    seen: int = 0  # how many like it come earlier in the file

    def key(self):
        return f"{self.file}|{self.text}|{self.label}|{self.seen}"

    def taken(self, share):
        part = int(hashlib.sha256(self.key().encode()).hexdigest()[:8], 16) % 1000
        return part < RATES.get(self.label, 1000) * share


def masked(text):
    """The text with blanks in place of comments and of what literals hold."""
    def blank(m):
        s = m.group(0)
        return '"' + re.sub(r"[^\n]", "_", s[1:-1]) + '"' if s[0] in "\"'R" else re.sub(r"[^\n]", " ", s)
    return re.sub(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'',
                  blank, text, flags=re.S)


def closing(code, at):
    """Of the bracket at `at`: where its partner is."""
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] in "([{") - (code[i] in ")]}")
        if depth == 0:
            return i
    return len(code)


STOP_LEFT = re.compile(r"(return|co_return|case|throw|[^=!<>]=|&&|\|\||<<|>>|[,;?]|(?<!:):(?!:))\s*$")


def operand_left(code, end):
    """Where the operand of a logical operator (or the condition of a choice) begins that ends at `end`."""
    depth, i = 0, end
    while i > 0:
        c = code[i - 1]
        if c in ")]}":
            depth += 1
        elif c in "([{":
            depth -= 1
            if depth < 0:
                break
        elif depth == 0 and (c in ",;?&|=:n<" or code[:i].endswith(("return", "throw"))):
            if STOP_LEFT.search(code[max(0, i - 12):i]) and code[i:i + 1] != "=" and code[i:i + 1] != ":":
                break
        i -= 1
    return i + len(code[i:end]) - len(code[i:end].lstrip())


def operand_right(code, begin):
    depth = 0
    for i in range(begin, len(code)):
        c = code[i]
        depth += (c in "([{") - (c in ")]}")
        if depth < 0 or (depth == 0 and (c in ",;?" or code.startswith(("&&", "||", " : "), i))):
            break
    return begin + len(code[begin:i].rstrip())


def arguments(code, opening):
    """The arguments of the call whose bracket is at `opening`, as (first, last + 1)."""
    end, depth, begin, found = closing(code, opening), 0, opening + 1, []
    for i in range(opening + 1, end + 1):
        if i == end or (code[i] == "," and depth == 0):
            found.append((i - len(code[begin:i].lstrip()), begin + len(code[begin:i].rstrip())))
            begin = i + 1
        elif i < end:
            depth += (code[i] in "([{") - (code[i] in ")]}")
    return found


def choose(changed):  # an edit that evaluates `changed` in place of what it encloses
    return f"({ON}({{n}}) ? ({changed}) : (", "))"


OPERATORS = {"<": ("Less", "bound"), ">": ("Greater", "bound"), "<=": ("LessEqual", "bound"),
             ">=": ("GreaterEqual", "bound"), "==": ("Equal", "equality"), "!=": ("Unequal", "equality"),
             "+": ("Plus", "sign"), "-": ("Minus", "sign"), "*": ("Times", "factor dropped"),
             "/": ("Divide", "divisor dropped")}
FIXED = re.compile(r"\b(static_assert|template|constexpr|concept|requires|using|case|operator|enum|namespace)\b|^#|std::array<"
                   r"|^expect\(")  # of the program itself: always true


def places(text):
    """Yields (position, label, edits)."""
    code = masked(text)
    for m in re.finditer(r"(?<=[\w)\]}\"]) (<=|>=|==|!=|<|>|\+|-|\*|/)(?=\s+[\w(\-!*&{\"'~])", code):
        tag, label = OPERATORS[m.group(1)]
        if tag == "Plus" and ('"' == code[m.start() - 1] or re.match(r"\s+\"", code[m.end():])):
            continue
        if tag == "Less" and re.search(r"\bfor \([^;()]*;[^;]*$", code[max(0, m.start() - 120):m.start()]):
            tag, label = "NotLast", "last skipped"
        yield m.start(), label, [(m.end(), m.end(), f" ::pare::mutant::{tag}{{{{n}}}} {m.group(1)}", "")]
    for m in re.finditer(r"\bif \(", code):
        opening = m.end() - 1
        end = closing(code, opening)
        begin = code.rfind(";", opening, end) + 1 or opening + 1
        begin += len(code[begin:end]) - len(code[begin:end].lstrip())
        if re.match(r"(const |auto)?[\w:<>*&, ]+ [*&]?\w+ = ", code[begin:end]):
            continue
        guard = re.match(r"\) \{?\s*(return|continue|break|throw|fail|expect)\b", code[end:])
        yield m.start(), "guard dropped" if guard else "never", [(begin, end, f"!{ON}({{n}}) && (", ")")]
        if not guard:
            yield m.start(), "always", [(begin, end, f"{ON}({{n}}) || (", ")")]
    for m in re.finditer(r"(?<=\s)(&&|\|\|)(?=\s)", code):
        was = m.group(1)
        test = f"({ON}({{n}}) || (" if was == "&&" else f"(!{ON}({{n}}) && ("
        for begin, end in ((operand_left(code, m.start()), m.start()),
                           (m.end() + 1, operand_right(code, m.end() + 1))):
            begin += len(code[begin:end]) - len(code[begin:end].lstrip())
            yield begin, "operand dropped", [(begin, begin + len(code[begin:end].rstrip()), test, "))")]
    for m in re.finditer(r"(?<=[\w)\]\"]) \?\s", code):
        begin = operand_left(code, m.start())
        yield m.start(), "choice", [(begin, m.start(), f"(!{ON}({{n}}) && (", "))")]
        yield m.start(), "choice", [(begin, m.start(), f"({ON}({{n}}) || (", "))")]
    for m in re.finditer(r"\bstd::(min|max|clamp)(<[\w:]+>)?\(", code):
        args, end = arguments(code, m.end() - 1), closing(code, m.end() - 1) + 1
        a = [text[i:j] for i, j in args]
        if len(a) == 3 and m.group(1) == "clamp":
            others = [f"std::min{m.group(2) or ''}({a[0]}, {a[2]})", f"std::max{m.group(2) or ''}({a[0]}, {a[1]})"]
        else:
            others = a if len(a) == 2 else []
        for other in others:
            yield m.start(), "limit dropped", [(m.start(), end, *choose(other))]
    for m in re.finditer(r"(?:^|[;{(,]|\) )\s*([\w.\->\[\]*]+) \+= ", code, re.M):
        yield m.start(1), "sum restarts", [(m.start(1), m.end(1), "::pare::mutant::zeroed({n}, ", ")")]
    for m in re.finditer(r"(?<![\w.'])(\d+(?:\.\d+)?(?:e-?\d+)?)(?![\w.'])", code):
        if code[m.start() - 1] in "<[" or code[m.end()] in ">]":
            continue
        value = m.group(1)
        other = {"0": "1", "1": "2", "0.0": "1.0"}.get(value, f"{value} + 1" if value.isdigit() else f"2 * {value}")
        line = code[code.rfind("\n", 0, m.start()) + 1:m.start()]
        named = re.search(r"\bconstexpr (?=[\w:]+ \w+ = )", line)
        if named:
            at = m.start() - len(line) + named.start()
            chosen = (f"(::pare::mutant::chosen == {{n}} ? ({other}) : (", "))")  # on() would be a constant expression
            yield m.start(), "named constant", [(at, at + 10, None, "const "), (m.start(), m.end(), *chosen)]
        else:
            yield m.start(), "constant", [(m.start(), m.end(), *choose(other))]
    for m in re.finditer(r"(?:^ +|\) )((?!return|throw|delete|else|using|expect\b|fail\b|static|goto)"
                         r"[\w.:>\[\]\-]+(?:\([^\n]*\)| [+\-*/|&]?= [^\n]*);)$", code, re.M):
        if "?" not in m.group(1) and ".reserve(" not in m.group(1) and m.group(1).count("(") == m.group(1).count(")"):
            yield m.start(1), "statement dropped", [(m.start(1), m.end(1), f"{{ if (!{ON}({{n}})) ", " }")]
    for m in re.finditer(r"(?<=[{,\s])\.(\w+) = ", code):
        end = operand_right(code, m.end())
        if code[end:end + 1] in ",}" and "?" not in code[m.end():end] and code[m.end():end] not in ("0", "{}", "false"):
            was = text[m.end():end]
            yield m.start(), "field at its default", [(m.end(), end, *choose(f"std::decay_t<decltype({was})>()"))]
    for m in re.finditer(r"(?<![\w.>:])(?!if|for|while|switch|return|sizeof)((?:[\w:]+(?:\.|->))*[a-z_]\w*)\(", code):
        args, end = arguments(code, m.end() - 1), closing(code, m.end() - 1) + 1
        words = [text[i:j] for i, j in args]
        for k in range(len(words) - 1):
            if all(re.fullmatch(r"[a-z_][\w.]*", w) for w in words[k:k + 2]) and words[k] != words[k + 1]:
                other = words[:k] + [words[k + 1], words[k]] + words[k + 2:]
                yield m.start(), "arguments swapped", [(m.start(), end, *choose(f"{m.group(1)}({', '.join(other)})"))]
    for m in re.finditer(r"\bRngStream::(\w+)\b(?= *[,)])", code):
        other = "token_plan" if m.group(1) == "sample" else "sample"
        yield m.start(), "other stream", [(m.start(), m.end(), *choose(f"RngStream::{other}"))]
    for m in re.finditer(r"\b(?:rng_key|rng_word|sequence_uid|Rng|Rng rng)\(", code):
        for begin, end in arguments(code, m.end() - 1):
            if not code[begin:end].startswith("RngStream") and code[begin:end] != "0":
                yield m.start(), "part of a key dropped", [(begin, end, *choose(f"decltype({text[begin:end]}){{}}"))]
    for m in re.finditer(r"\.(set|add)\(", code):
        args = arguments(code, m.end() - 1)
        if not args or args[-1][0] == args[-1][1]:
            continue
        i, j = args[-1]
        if m.group(1) == "set" and len(args) == 2 and text[args[0][0]] == '"':
            yield m.start(), "metric one higher", [(i, j, f"({ON}({{n}}) ? 1 : 0) + (", ")")]
        elif m.group(1) == "add" and len(args) == 1:
            yield m.start(), "metric negated", [(i, j, f"({ON}({{n}}) ? -1 : 1) * (", ")")]


def mutants(file, listed):
    """All mutants of a file: the listed ones, (text, replacement, what it is), then those of the rules."""
    text = open(file).read()
    code, counts = masked(text), {}

    def make(at, label, edits):
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        m = Mutant(file, text.count("\n", 0, at) + 1, text[start:end].strip(), label, edits)
        key = m.key()  # before `seen` is set
        m.seen = counts[key] = counts.get(key, -1) + 1
        return m
    for was, becomes, label in listed:
        before, _, rest = was.rpartition("[[")
        inner, whole = rest.split("]]")[0], was.replace("[[", "").replace("]]", "")
        assert text.count(whole) == 1, f"{file} holds {whole!r} {text.count(whole)} times: mend tools/mutants/listed.py"
        at = text.index(whole) + len(before)
        around = (f"{{ if ({ON}({{n}})) {{ {becomes} }} else {{ ", " } }") if inner.endswith(";") else choose(becomes)
        yield make(at, label, [(at, at + len(inner), *around)])
    for at, label, edits in places(text):
        start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
        if label == "named constant" or not FIXED.search(code[start:end].strip()):
            yield make(at, label, edits)


def write(text, numbered):
    """The text with all its mutants, (number, mutant): each waits for its number."""
    opens, closes, replaced = [], [], {}
    for order, (n, m) in enumerate(numbered):
        for begin, end, before, after in m.edits:
            if before is None:
                replaced[begin, end] = after
            else:
                opens.append((begin, 1, begin - end, order, before.replace("{n}", str(n))))
                if after:
                    closes.append((end, 0, end - begin, -order, after.replace("{n}", str(n))))
    parts, at = ['#include "tools/mutants/mutant.h"\n#line 1\n'], 0
    for position, _, _, _, inserted in sorted(opens + closes + [(b, 2, 0, 0, (e, s)) for (b, e), s in replaced.items()],
                                              key=lambda e: e[:4]):
        parts.append(text[at:position])
        at = position
        if isinstance(inserted, tuple):
            at, inserted = inserted
        parts.append(inserted)
    return "".join(parts) + text[at:]
