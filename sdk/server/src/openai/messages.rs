//! OpenAI's messages, as templates of open models take them.

use pagoda::{Error, Result};
use serde_json::Value;

/// Makes one text of content in parts, and objects of the arguments of tool calls.
pub fn normalise(messages: &mut [Value]) -> Result<()> {
    for (at, message) in messages.iter_mut().enumerate() {
        let path = format!("messages[{at}]");
        if let Some(content) = message.get_mut("content") {
            *content = whole_text(&format!("{path}.content"), content.take())?;
        }
        for call in message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten() {
            let arguments = call.get_mut("function").and_then(|function| function.get_mut("arguments"));
            if let Some(arguments) = arguments {
                let object = arguments.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok());
                // Clients send what the model said, which need not be JSON.
                if let Some(object) = object.filter(Value::is_object) {
                    *arguments = object;
                }
            }
        }
    }
    Ok(())
}

fn whole_text(path: &str, content: Value) -> Result<Value> {
    let parts = match content {
        Value::Array(parts) => parts,
        Value::String(_) | Value::Null => return Ok(content),
        other => return Err(Error::invalid(path, format!("{other} is neither a text nor a list of parts"))),
    };
    let mut whole = String::new();
    for (at, part) in parts.iter().enumerate() {
        match (part.get("type").and_then(Value::as_str), part.get("text").and_then(Value::as_str)) {
            (Some("text"), Some(text)) => whole.push_str(text),
            (Some("text"), None) => return Err(Error::invalid(format!("{path}[{at}].text"), "missing, or not a text")),
            (Some(other), _) => {
                let message = format!("{other:?}: this server takes parts of the type \"text\" only");
                return Err(Error::invalid(format!("{path}[{at}].type"), message));
            }
            (None, _) => return Err(Error::invalid(format!("{path}[{at}].type"), "missing, or not a text")),
        }
    }
    Ok(whole.into())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn parts_become_a_text_and_arguments_an_object() {
        let mut messages = [
            json!({"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}),
            json!({"role": "assistant", "content": null, "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{\"x\": 1}"}},
                {"id": "2", "type": "function", "function": {"name": "f", "arguments": "not JSON"}},
            ]}),
        ];
        normalise(&mut messages).unwrap();
        assert_eq!(messages[0]["content"], json!("ab"));
        assert_eq!(messages[1]["content"], Value::Null);
        assert_eq!(messages[1]["tool_calls"][0]["function"]["arguments"], json!({"x": 1}));
        assert_eq!(messages[1]["tool_calls"][1]["function"]["arguments"], json!("not JSON"));
    }

    #[test]
    fn other_parts_are_refused_with_their_place() {
        for (content, message) in [
            (json!([{"type": "image_url"}]), "messages[0].content[0].type: \"image_url\": this server takes"),
            (json!([{"type": "text"}]), "messages[0].content[0].text: missing"),
            (json!([1]), "messages[0].content[0].type: missing"),
            (json!(7), "messages[0].content: 7 is neither"),
        ] {
            let error = normalise(&mut [json!({"role": "user", "content": content})]).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }
}
