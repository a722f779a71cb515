"""MB/s of the Rust library on one core: python3 tokenizer.py TOKENIZER.json TEXT.  Prints nothing where Python lacks it."""
import sys
import time

try:
    from tokenizers import Tokenizer
except ImportError:
    sys.exit()

tokenizer = Tokenizer.from_file(sys.argv[1])
text = open(sys.argv[2], encoding="utf-8", newline="").read()
best = 1e9
for _ in range(3):
    start = time.perf_counter()
    tokenizer.encode(text, add_special_tokens=False)
    best = min(best, time.perf_counter() - start)
print(len(text.encode()) / best * 1e-6)
