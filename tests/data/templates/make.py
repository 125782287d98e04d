"""Renders chat templates with transformers: what sdk/src/text/template has to give, to the character.

    python make.py              writes cases.json, and NAME.json for each NAME.jinja beside this script
    python make.py FOLDER       writes NAME.json for each NAME.jinja in a folder of your own

It needs transformers and jinja2; their versions are in each file. cases.json has the inputs. NAME.json has for each of
them the text that is expected, or an error: {"error": the message that the template raised}, or {"error": null} where
it failed in another way. The date of strftime_now is fixed, see NOW.

The templates are written for this test, in the constructs and formats of the models that they are named after. To
try those of models themselves, put them into a folder, run this script on it, and set PAGODA_TEMPLATES to it for
`cargo test text::template`.
"""

import copy
import datetime
import json
import sys
from importlib.metadata import version
from pathlib import Path

import jinja2
from transformers.utils import chat_template_utils

NOW = datetime.datetime(2026, 3, 7, 15, 4, 9, 120)

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def say(role, content, **more):
    return {"role": role, "content": content, **more}


def call(name, arguments, id="call12345"):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in \u00abOrl\u00e9ans\u00bb or \u6771\u4eac.\nIt's \"now\" <or> later & free.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "The city's name"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"},
                "days": {"type": "integer", "minimum": 1, "maximum": 14, "default": None},
                "hourly": {"type": "boolean", "default": False, "nullable": True},
                "places": {
                    "type": "array",
                    "description": "Points",
                    "items": {"type": "array", "items": {"type": "number"}, "minItems": 2},
                    "default": [],
                },
                "limits": {
                    "type": "object",
                    "description": "Limits",
                    "properties": {"low": {"type": "number", "default": -0.5}, "high": {"type": ["number", "null"]}},
                    "required": ["low"],
                },
                "anything": {"description": "No type", "examples": [1.0, 1e16, 1e-07, 0.125, True, None, {}, ""]},
            },
            "required": ["city"],
        },
        "return": {"type": "string", "description": "A sentence"},
    },
}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}},
}
BARE = {
    "name": "bare",
    "description": "Without a wrapper",
    "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": []},
}

ASKED = say("user", "What's the weather in Paris & Rome?")
TALK = [
    say("system", "You are a pirate."),
    say("user", "Hello, how are you?"),
    say("assistant", "Arr! I'm doing great."),
    say("user", "Who is \"Blackbeard\"?\nTell me <everything>."),
]
PARTS = [
    say("system", [{"type": "text", "text": "Be brief."}]),
    say("user", [{"type": "text", "text": " One "}, {"type": "text", "text": "two"}, {"type": "image"}]),
    say("assistant", [{"type": "text", "text": "Three."}]),
    say("user", [{"type": "text", "text": "Four?"}]),
]
ARGUMENTS = {
    "city": "Paris \U0001f1eb\U0001f1f7",
    "days": 3,
    "hourly": True,
    "unit": None,
    "limits": {"low": -1.5, "high": 1e22},
    "places": [[1, 2.0], []],
}
RESULT = '{"temperature": 21.5, "ok": true, "none": null}'
CALLS = [
    ASKED,
    say("assistant", None, tool_calls=[call("get_weather", ARGUMENTS)]),
    say("tool", RESULT, name="get_weather", tool_call_id="call12345"),
    say("assistant", "It is 21.5\u00b0C in Paris."),
    say("user", "Thanks! And the time?"),
]
TWO = [call("get_weather", {"city": "Paris"}, "aaaaaaaa1"), call("clock", {}, "aaaaaaaa2")]
PARALLEL = [
    ASKED,
    say("assistant", "Let me see.", tool_calls=TWO),
    say("tool", RESULT, name="get_weather", tool_call_id="aaaaaaaa1"),
    say("tool", "12:00", name="clock", tool_call_id="aaaaaaaa2"),
]
THOUGHT = [
    say("user", "1 + 1?"),
    say("assistant", "2", reasoning_content="One and one.\nThat is two."),
    say("user", "2 + 2?"),
    say("assistant", "<think>\nTwo and two.\n</think>\n\n4"),
    say("user", "3 + 3?"),
]
FINAL = [say("user", "Count."), say("assistant", "One, two, ")]

MARKS = "\u4f60\u597d \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u05e9\u05c1 \u200b\x1f\x7f\xa0 \\ ' \""
SPACES = [
    say("system", "\n be \t"),
    say("user", " \x1c\u3000Hi\r\n\u2028 "),
    say("assistant", "\n\nYes \n"),
    say("user", ""),
]
TEXT_CALL = [ASKED, say("assistant", "", tool_calls=[call("get_weather", json.dumps(ARGUMENTS))])]
SHORT_ID = [ASKED, say("assistant", None, tool_calls=[call("clock", {}, "1")])]
OBJECT = {"temperature": 21.50, "ok": True, "none": None}
OBJECT_RESULT = [*CALLS[:2], say("tool", OBJECT, name="get_weather", tool_call_id="call12345")]
DATED = {"date_string": "01 Jan 2030", "builtin_tools": ["search", "code_interpreter"], "tools_in_user_message": False}
DOCUMENTS = [{"title": "Paris", "text": "A city."}, {"title": "Rome", "text": "Another\none.", "year": -753}]
OFF = {"enable_thinking": False, "thinking": False}
ON = {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}
PROMPT = {"add_generation_prompt": True}
TOOLS = {"tools": [WEATHER, CLOCK]}

# Name, messages, and the rest of the input where it is not the default.
CASES = [
    ("user", [say("user", "Hi")], {}),
    ("user, prompt", [say("user", "Hi")], PROMPT),
    ("talk", TALK, {}),
    ("talk, prompt", TALK, PROMPT),
    ("talk without system", TALK[1:], PROMPT),
    ("system alone", TALK[:1], PROMPT),
    ("unicode", [say("user", MARKS)], {}),
    ("spaces", SPACES, PROMPT),
    ("markup", [say("user", "{{ 1 }} {% if %} <|im_end|> </s> [INST] &amp; <b>")], {}),
    ("empty", [], {}),
    ("empty, prompt", [], PROMPT),
    ("no role", [{"content": "Hi"}], PROMPT),
    ("no content", [{"role": "user"}], PROMPT),
    ("null content", [say("user", None)], PROMPT),
    ("number content", [say("user", 5), say("assistant", 2.50), say("user", True)], {}),
    ("unknown role", [say("user", "Hi"), say("narrator", "Night falls.")], {}),
    ("developer", [say("developer", "Rules."), say("user", "Hi")], PROMPT),
    ("assistant first", [say("assistant", "Hi"), say("user", "Hi")], {}),
    ("two users", [say("user", "a"), say("user", "b")], PROMPT),
    ("system late", [say("user", "a"), say("system", "b"), say("user", "c")], {}),
    ("parts", PARTS, PROMPT),
    ("empty parts", [say("user", [])], {}),
    ("tools", [ASKED], {**TOOLS, **PROMPT}),
    ("tools and system", TALK, {"tools": [WEATHER], **PROMPT}),
    ("bare tool", TALK, {"tools": [BARE]}),
    ("no tools", TALK, {"tools": []}),
    ("calls", CALLS, {**TOOLS, **PROMPT}),
    ("calls, last is a result", CALLS[:3], {**TOOLS, **PROMPT}),
    ("calls without tools", CALLS, {}),
    ("call with text arguments", TEXT_CALL, {"tools": [WEATHER]}),
    ("parallel calls", PARALLEL, {**TOOLS, **PROMPT}),
    ("calls and system", [TALK[0], *PARALLEL], TOOLS),
    ("empty calls", [ASKED, say("assistant", "Fine.", tool_calls=[])], {}),
    ("short id", SHORT_ID, {"tools": [CLOCK]}),
    ("result as object", OBJECT_RESULT, {"tools": [WEATHER]}),
    ("thought", THOUGHT, PROMPT),
    ("thinking off", THOUGHT, {"extra": OFF, **PROMPT}),
    ("thinking on", TALK, {"extra": ON, **PROMPT}),
    ("date given", [ASKED], {"tools": [CLOCK], "extra": DATED}),
    ("documents", [ASKED], {"extra": {"documents": DOCUMENTS, "citation_mode": "accurate"}, **PROMPT}),
    ("continued", FINAL, {"continue_final_message": True}),
    ("continued parts", [FINAL[0], say("assistant", PARTS[2]["content"])], {"continue_final_message": True}),
    ("continued nothing", [], {"continue_final_message": True}),
    ("continued null", CALLS[:2], {"continue_final_message": True}),
]


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def render(template, messages, options):
    rest = {key: value for key, value in copy.deepcopy(options).items() if key != "extra"}
    variables = {**TOKENS, **copy.deepcopy(options.get("extra", {}))}
    (text,), _ = chat_template_utils.render_jinja_template(
        [copy.deepcopy(messages)], chat_template=template, **rest, **variables
    )
    return text


def outcome(template, messages, options):
    try:
        return render(template, messages, options)
    except jinja2.exceptions.TemplateError as error:
        # Those of raise_exception are of this very class, all others of one below it.
        return {"error": error.message if type(error) is jinja2.exceptions.TemplateError else None}
    except Exception:
        return {"error": None}


def write(path, made):
    made = {"made_by": f"transformers {version('transformers')}, jinja2 {version('jinja2')}", **made}
    path.write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")


def main(folder):
    chat_template_utils.datetime = Clock
    for path in sorted(folder.glob("*.jinja")):
        # Not read_text, which changes line ends.
        template = path.read_bytes().decode()
        write(path.with_suffix(".json"), {"expected": {case[0]: outcome(template, *case[1:]) for case in CASES}})


HERE = Path(__file__).parent
if __name__ == "__main__":
    if len(sys.argv) == 1:
        cases = [{"name": name, "messages": messages, **options} for name, messages, options in CASES]
        write(HERE / "cases.json", {"tokens": TOKENS, "cases": cases})
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
