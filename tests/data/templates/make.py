"""Renders chat templates with transformers: what sdk/src/text/template has to give, to the character.

    python make.py              writes NAME.json for each NAME.jinja beside this script
    python make.py FOLDER       the same in another folder, with templates of your own

It needs transformers and jinja2; the versions are in each file. The date of strftime_now is fixed, see NOW. A case has
the input, and either the text that is expected or an error: the message that the template raised, or null where
it failed in another way.
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
        "description": "The weather in a city, e.g. \u00abOrl\u00e9ans\u00bb or \u6771\u4eac.\nIt's \"now\" <or> later & free.",
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
                "anything": {"description": "No type", "examples": [1.0, 1e16, 1e-07, 123456789.125, True, None, {}, ""]},
            },
            "required": ["city"],
        },
        "return": {"type": "string", "description": "A sentence"},
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "description": "The time", "parameters": {"type": "object", "properties": {}}}}  # fmt: skip
BARE = {"name": "bare", "description": "Without a wrapper", "parameters": {"type": "object", "properties": {"z": {"type": "string"}, "a": {"type": "integer"}}, "required": []}}  # fmt: skip

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
ARGUMENTS = {"city": "Paris \U0001f1eb\U0001f1f7", "days": 3, "hourly": True, "unit": None, "limits": {"low": -1.5, "high": 1e22}, "places": [[1, 2.0], []]}  # fmt: skip
RESULT = '{"temperature": 21.5, "ok": true, "none": null}'
CALLS = [
    ASKED,
    say("assistant", None, tool_calls=[call("get_weather", ARGUMENTS)]),
    say("tool", RESULT, name="get_weather", tool_call_id="call12345"),
    say("assistant", "It is 21.5\u00b0C in Paris."),
    say("user", "Thanks! And the time?"),
]
PARALLEL = [
    ASKED,
    say("assistant", "Let me see.", tool_calls=[call("get_weather", {"city": "Paris"}, "aaaaaaaa1"), call("clock", {}, "aaaaaaaa2")]),
    say("tool", RESULT, name="get_weather", tool_call_id="aaaaaaaa1"),
    say("tool", "12:00", name="clock", tool_call_id="aaaaaaaa2"),
]  # fmt: skip
THOUGHT = [
    say("user", "1 + 1?"),
    say("assistant", "2", reasoning_content="One and one.\nThat is two."),
    say("user", "2 + 2?"),
    say("assistant", "<think>\nTwo and two.\n</think>\n\n4"),
    say("user", "3 + 3?"),
]
FINAL = [say("user", "Count."), say("assistant", "One, two, ")]

# Name, messages, and the rest of the input where it is not the default.
CASES = [
    ("user", [say("user", "Hi")], {}),
    ("user, prompt", [say("user", "Hi")], {"add_generation_prompt": True}),
    ("talk", TALK, {}),
    ("talk, prompt", TALK, {"add_generation_prompt": True}),
    ("talk without system", TALK[1:], {"add_generation_prompt": True}),
    ("system alone", TALK[:1], {"add_generation_prompt": True}),
    ("unicode", [say("user", "\u4f60\u597d \U0001f468\u200d\U0001f469\u200d\U0001f467 e\u0301 \u05e9\u05c1 \u200b\x1f\x7f\xa0 \\ ' \"")], {}),
    ("spaces", [say("system", "\n be \t"), say("user", " \x1c\u3000Hi\r\n\u2028 "), say("assistant", "\n\nYes \n"), say("user", "")], {"add_generation_prompt": True}),
    ("markup", [say("user", "{{ 1 }} {% if %} <|im_end|> </s> [INST] &amp; <b>")], {}),
    ("empty", [], {}),
    ("empty, prompt", [], {"add_generation_prompt": True}),
    ("no role", [{"content": "Hi"}], {"add_generation_prompt": True}),
    ("no content", [{"role": "user"}], {"add_generation_prompt": True}),
    ("null content", [say("user", None)], {"add_generation_prompt": True}),
    ("number content", [say("user", 5), say("assistant", 2.50), say("user", True)], {}),
    ("unknown role", [say("user", "Hi"), say("narrator", "Night falls.")], {}),
    ("developer", [say("developer", "Rules."), say("user", "Hi")], {"add_generation_prompt": True}),
    ("assistant first", [say("assistant", "Hi"), say("user", "Hi")], {}),
    ("two users", [say("user", "a"), say("user", "b")], {"add_generation_prompt": True}),
    ("system late", [say("user", "a"), say("system", "b"), say("user", "c")], {}),
    ("parts", PARTS, {"add_generation_prompt": True}),
    ("empty parts", [say("user", [])], {}),
    ("tools", [ASKED], {"tools": [WEATHER, CLOCK], "add_generation_prompt": True}),
    ("tools and system", TALK, {"tools": [WEATHER], "add_generation_prompt": True}),
    ("bare tool", TALK, {"tools": [BARE]}),
    ("no tools", TALK, {"tools": []}),
    ("calls", CALLS, {"tools": [WEATHER, CLOCK], "add_generation_prompt": True}),
    ("calls, last is a result", CALLS[:3], {"tools": [WEATHER, CLOCK], "add_generation_prompt": True}),
    ("calls without tools", CALLS, {}),
    ("call with text arguments", [ASKED, say("assistant", "", tool_calls=[call("get_weather", json.dumps(ARGUMENTS))])], {"tools": [WEATHER]}),
    ("parallel calls", PARALLEL, {"tools": [WEATHER, CLOCK], "add_generation_prompt": True}),
    ("calls and system", [TALK[0], *PARALLEL], {"tools": [WEATHER, CLOCK]}),
    ("empty calls", [ASKED, say("assistant", "Fine.", tool_calls=[])], {}),
    ("short id", [ASKED, say("assistant", None, tool_calls=[call("clock", {}, "1")])], {"tools": [CLOCK]}),
    ("result as object", [*CALLS[:2], say("tool", {"temperature": 21.50, "ok": True, "none": None}, name="get_weather", tool_call_id="call12345")], {"tools": [WEATHER]}),
    ("thought", THOUGHT, {"add_generation_prompt": True}),
    ("thinking off", THOUGHT, {"add_generation_prompt": True, "extra": {"enable_thinking": False, "thinking": False}}),
    ("thinking on", TALK, {"add_generation_prompt": True, "extra": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"}}),
    ("date given", [ASKED], {"tools": [CLOCK], "extra": {"date_string": "01 Jan 2030", "builtin_tools": ["brave_search", "code_interpreter"], "tools_in_user_message": False}}),
    ("documents", [ASKED], {"add_generation_prompt": True, "extra": {"documents": [{"title": "Paris", "text": "A city."}, {"title": "Rome", "text": "Another\none.", "year": -753}], "citation_mode": "accurate"}}),
    ("continued", FINAL, {"continue_final_message": True}),
    ("continued parts", [FINAL[0], say("assistant", [{"type": "text", "text": "One, two,"}])], {"continue_final_message": True}),
    ("continued nothing", [], {"continue_final_message": True}),
    ("continued null", CALLS[:2], {"continue_final_message": True}),
]  # fmt: skip


class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return NOW


def render(template, messages, options):
    rest = {key: value for key, value in copy.deepcopy(options).items() if key != "extra"}
    (text,), _ = chat_template_utils.render_jinja_template(
        [copy.deepcopy(messages)], chat_template=template, **rest, **{**TOKENS, **copy.deepcopy(options.get("extra", {}))}
    )
    return text


def cases(template):
    for name, messages, options in CASES:
        case = {"name": name, "messages": messages, **options}
        try:
            case["expected"] = render(template, messages, options)
        except jinja2.exceptions.TemplateError as error:
            # Only those of raise_exception are of this very class.
            case["error"] = error.message if type(error) is jinja2.exceptions.TemplateError else None
        except Exception:
            case["error"] = None
        yield case


def main(folder):
    chat_template_utils.datetime = Clock
    for path in sorted(folder.glob("*.jinja")):
        # Not read_text: its line ends are those of the file.
        template = path.read_bytes().decode()
        made = {
            "made_by": f"transformers {version('transformers')}, jinja2 {version('jinja2')}",
            "tokens": TOKENS,
            "cases": list(cases(template)),
        }
        path.with_suffix(".json").write_text(json.dumps(made, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
