#!/usr/bin/env python3
"""Random conversations rendered by the chat function of transformers, for tests/test_chat.cpp.

    python tools/make_chat_golden.py TEMPLATES tests/golden/chat.json

needs transformers and jinja2.  TEMPLATES is a folder with the published templates (FILES; SmolLM2's is the
chat_template of the folder that tools/get_smollm2.sh makes); each conversation is rendered by the published template
and by the one that pare writes (tokenizer/chat_jinja.cpp), which must agree.
"""
import json
import pathlib
import random
import re
import sys

from transformers.utils.chat_template_utils import render_jinja_template

FILES = {"qwen2.5": "Qwen-Qwen2.5-7B-Instruct", "qwen3": "Qwen-Qwen3-0.6B",
         "llama-3": "meta-llama-Llama-3.2-3B-Instruct", "deepseek-r1": "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B",
         "chatml": "HuggingFaceTB-SmolLM2-135M-Instruct"}
BODIES = {"qwen2.5": ["kSystem", "kChatml"], "qwen3": ["kQwen3"], "llama-3": ["kLlama3"],
          "deepseek-r1": ["kDeepSeek"], "chatml": ["kSystem", "kChatml"]}
BOS = {"llama-3": "<|begin_of_text|>", "deepseek-r1": "<｜begin▁of▁sentence｜>"}
SYSTEMS = {"qwen2.5": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant.",
           "chatml": "You are a helpful AI assistant named SmolLM, trained by Hugging Face"}
DATE = "26 Jul 2024"
PARTS = ["a", "1+1?", " ", "\n", "\n\n", "<think>", "</think>", "<think>\nx\n</think>\n\n", "\u3000é", "\t", "{{ x }}", "'"]
TEXTS = ["Q: {problem}\nA:", "{problem}", "<s>{problem};{problem}", "it's \\boxed{} {% if %} #} -#} {problem}\t\x01\r\u2028é"]


def literal(text):
    escaped = "".join("\\n" if c == "\n" else "\\" + c if c in "\\'" else f"\\x{ord(c):02x}" if ord(c) < 32 else c
                      for c in text)
    return f"'{escaped}'"


def own_bodies():
    source = (pathlib.Path(__file__).parent.parent / "tokenizer/chat_jinja.cpp").read_text()
    found = {name: "".join(re.search(rf'{body} = R"\((.*?)\)";', source, re.S).group(1) for body in bodies)
             for name, bodies in BODIES.items()}
    return {name: text.replace("SYSTEM", literal(SYSTEMS.get(name, ""))).replace("DATE", literal(DATE))
            for name, text in found.items()}


def content(rng):
    text = "".join(rng.choice(PARTS) for _ in range(rng.randrange(4)))
    return f"<tool_response>{text}</tool_response>" if rng.random() < 0.15 else text


def conversation(rng, family):
    messages = [{"role": "system", "content": content(rng)}] if rng.random() < 0.4 else []
    for _ in range(rng.randrange(1, 6)):
        message = {"role": rng.choice(["user", "assistant"]), "content": content(rng)}
        if rng.random() < 0.05:
            message["role"] = "system"
        if family == "qwen3" and message["role"] == "assistant" and rng.random() < 0.4:
            message["reasoning_content"] = rng.choice([None, "", "\n", "t", "\n t\n\n", "<think>t</think>"])
        messages.append(message)
    return messages


def render(template, messages, prompt, thinking, family):
    return render_jinja_template([messages], chat_template=template, add_generation_prompt=prompt,
                                 enable_thinking=thinking, date_string=DATE, bos_token=BOS.get(family))[0][0]


def main(templates, out, count=24):
    rng = random.Random(37)
    golden = {"families": {}, "texts": []}
    for family, body in own_bodies().items():
        published = (pathlib.Path(templates) / f"{FILES[family]}.jinja").read_text()
        rows = []
        for _ in range(count):
            messages, prompt = conversation(rng, family), rng.random() < 0.5
            thinking = family != "qwen3" or rng.random() < 0.7
            rendered = render(published, messages, prompt, thinking, family)
            assert rendered == render(body, messages, prompt, thinking, family), (family, messages)
            rows.append({"messages": messages, "prompt": prompt, "thinking": thinking, "rendered": rendered})
        golden["families"][family] = {"jinja": body, "system": SYSTEMS.get(family), "rows": rows}
    for text in TEXTS:
        for bos in ("", "<s>"):
            first = "" if text.startswith(bos) else bos
            jinja = "{{- " + literal(first + text).replace("{problem}", "' + messages[0].content + '") + " }}"
            said = "it's\n{problem}"
            rendered = render(jinja, [{"role": "user", "content": said}], True, True, "")
            assert rendered == (first + text).replace("{problem}", said), (text, rendered)
            golden["texts"].append({"text": text, "bos": bos, "jinja": jinja})
    lines = json.dumps(golden, ensure_ascii=True, indent=0)
    pathlib.Path(out).write_text(lines + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
