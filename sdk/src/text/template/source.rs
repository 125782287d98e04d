//! What is changed in a template's source before `minijinja` reads it.
//!
//! - `{% generation %}` … `{% endgeneration %}`, a tag of transformers, marks what the model wrote, for training. It becomes
//!   `{% with %}`, which prints its body too and has a scope of its own as well.
//! - A slice, `x[a:b:c]`, becomes a call of a method, which does it as Python does. `minijinja` gives an iterator, not a list,
//!   and panics where an empty list is reversed.
//! - What `{% for %}` goes over passes a filter that refuses what Python refuses: `minijinja` takes `none` for an empty list.
//! - Line ends become `\n`, as in Jinja2.
//!
//! Lines stay where they are, so that errors name the right one.

/// The name of the method that slices become.
pub(super) const SLICE: &str = "__slice__";

/// The name of the filter behind which loops go over a value.
pub(super) const ITERATE: &str = "__iter__";

pub(super) fn prepare(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut prepared = String::with_capacity(source.len());
    let mut rest = source.as_str();
    while let Some(at) = ["{%", "{{", "{#"].iter().filter_map(|open| rest.find(open)).min() {
        prepared.push_str(&rest[..at]);
        rest = &rest[at..];
        let length = if rest.starts_with("{#") { comment(rest) } else { code(rest, &mut prepared) };
        if rest.starts_with("{#") {
            prepared.push_str(&rest[..length]);
        } else if is_tag(&rest[..length], "raw") {
            let end = end_of_raw(&rest[length..]);
            prepared.push_str(&rest[length..length + end]);
            rest = &rest[length + end..];
            continue;
        }
        rest = &rest[length..];
    }
    prepared + rest
}

fn comment(rest: &str) -> usize {
    rest.find("#}").map_or(rest.len(), |end| end + 2)
}

/// How far the text behind `{% raw %}` goes: to the tag that ends it.
fn end_of_raw(rest: &str) -> usize {
    let mut at = 0;
    while let Some(found) = rest[at..].find("{%") {
        at += found;
        if is_tag(&rest[at..], "endraw") {
            return at;
        }
        at += 2;
    }
    rest.len()
}

/// Whether a text begins with a tag of this name.
fn is_tag(text: &str, name: &str) -> bool {
    let Some(inside) = text.strip_prefix("{%") else { return false };
    let inside = inside.strip_prefix(['-', '+']).unwrap_or(inside).trim_start();
    inside.strip_prefix(name).is_some_and(|rest| !rest.starts_with(|next: char| next.is_alphanumeric() || next == '_'))
}

/// Appends what becomes of a tag or an expression, and gives its length.
fn code(rest: &str, prepared: &mut String) -> usize {
    let close = if rest.starts_with("{%") { "%}" } else { "}}" };
    let mut brackets: Vec<Bracket> = Vec::new();
    let mut quote = None;
    let mut escaped = false;
    let begin = prepared.len();
    prepared.push_str(&rest[..2]);
    for (at, character) in rest.char_indices().skip(2) {
        if let Some(end) = quote {
            prepared.push(character);
            if escaped {
                escaped = false;
            } else if character == '\\' {
                escaped = true;
            } else if character == end {
                quote = None;
            }
            continue;
        }
        if brackets.is_empty() && rest[at..].starts_with(close) {
            prepared.push_str(close);
            for (old, new) in [("generation", "with"), ("endgeneration", "endwith")] {
                if is_tag(&rest[..at], old) {
                    let renamed = prepared[begin..].replacen(old, new, 1);
                    prepared.replace_range(begin.., &renamed);
                }
            }
            if is_tag(&rest[..at], "for") {
                let checked = with_checked_loop(&prepared[begin..]);
                prepared.replace_range(begin.., &checked);
            }
            return at + 2;
        }
        match character {
            '\'' | '"' => quote = Some(character),
            '[' | '(' | '{' => brackets.push(Bracket {
                at: prepared.len(),
                subscript: character == '[' && follows_a_value(&prepared[begin + 2..]),
                colons: Vec::new(),
            }),
            ':' => {
                if let Some(bracket) = brackets.last_mut() {
                    bracket.colons.push(prepared.len());
                }
            }
            ']' | ')' | '}' => match brackets.pop() {
                Some(bracket) if bracket.subscript && !bracket.colons.is_empty() => {
                    bracket.rewrite(prepared);
                    continue;
                }
                _ => {}
            },
            _ => {}
        }
        prepared.push(character);
    }
    rest.len()
}

/// A tag `{% for … in x if … %}` with `(x)|__iter__` in place of `x`.
fn with_checked_loop(tag: &str) -> String {
    let words = words_outside(tag);
    let Some(start) = words.iter().find(|(_, word)| *word == "in").map(|(at, word)| at + word.len()) else {
        return tag.to_owned();
    };
    let inside = tag.trim_end_matches("%}").trim_end_matches(['-', '+']);
    let end = words.iter().find(|(at, word)| *at > start && ["if", "recursive"].contains(word));
    let end = end.map_or(inside.len(), |(at, _)| *at);
    // White space goes behind the filter, with its line breaks.
    let value = tag[start..end].trim();
    let space = &tag[start + tag[start..end].find(value).unwrap_or(0) + value.len()..end];
    let before = &tag[..start + tag[start..end].find(value).unwrap_or(0)];
    format!("{before}({value})|{ITERATE}{space}{}", &tag[end..])
}

/// The words of a tag that are in no brackets and no text, with where they begin.
fn words_outside(tag: &str) -> Vec<(usize, &str)> {
    let mut words = Vec::new();
    let (mut depth, mut quote, mut escaped, mut begin) = (0, None, false, None);
    for (at, character) in tag.char_indices().skip(2) {
        let in_word = quote.is_none() && depth == 0 && (character.is_alphanumeric() || character == '_');
        if let (Some(start), false) = (begin, in_word) {
            words.push((start, &tag[start..at]));
            begin = None;
        }
        match (quote, character) {
            (Some(_), _) if escaped => escaped = false,
            (Some(_), '\\') => escaped = true,
            (Some(end), _) if character == end => quote = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quote = Some(character),
            (None, '(' | '[' | '{') => depth += 1,
            (None, ')' | ']' | '}') => depth -= 1,
            (None, _) if in_word => begin = begin.or(Some(at)),
            _ => {}
        }
    }
    words
}

/// An open bracket: where it stands in the text that is made, and the colons directly inside it.
struct Bracket {
    at: usize,
    subscript: bool,
    colons: Vec<usize>,
}

impl Bracket {
    /// Makes a call of `[a:b:c`, which is the end of the text.
    fn rewrite(self, prepared: &mut String) {
        let mut arguments = Vec::new();
        let mut from = self.at + 1;
        for end in self.colons.into_iter().chain([prepared.len()]) {
            let argument = &prepared[from..end];
            // Line breaks inside stay, so that no line moves.
            arguments.push(if argument.trim().is_empty() { format!("none{argument}") } else { argument.to_owned() });
            from = end + 1;
        }
        prepared.truncate(self.at);
        prepared.push_str(&format!(".{SLICE}({})", arguments.join(",")));
    }
}

/// Whether a bracket behind this text takes something out of a value, rather than beginning a list.
fn follows_a_value(text: &str) -> bool {
    let text = text.trim_end();
    let word_at = text
        .rfind(|character: char| !(character.is_alphanumeric() || character == '_'))
        .map_or(0, |at| at + text[at..].chars().next().map_or(0, char::len_utf8));
    match &text[word_at..] {
        "" => text.ends_with([')', ']', '"', '\'']),
        "in" | "and" | "or" | "not" | "if" | "else" | "elif" | "is" | "set" | "for" => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_become_calls() {
        for (source, expected) in [
            ("{{ a[1:] }}", "{{ a.__slice__(1,none) }}"),
            ("{{ a[::-1] }}", "{{ a.__slice__(none,none,-1) }}"),
            ("{{ a[b[1:][0]:c['x:y']] }}", "{{ a.__slice__(b.__slice__(1,none)[0],c['x:y']) }}"),
            ("{% for x in [{'a': 1}, f(y)[:-1]] %}", "{% for x in ([{'a': 1}, f(y).__slice__(none,-1)])|__iter__ %}"),
            ("{{ 'abc'[1:2] + \"[1:]\" }}", "{{ 'abc'.__slice__(1,2) + \"[1:]\" }}"),
            ("{{ {'a': {'b': 1}} }}", "{{ {'a': {'b': 1}} }}"),
            (
                "a[1:] {# a[1:] #} {% raw %}{{ a[1:] }}{% endraw %}",
                "a[1:] {# a[1:] #} {% raw %}{{ a[1:] }}{% endraw %}",
            ),
            ("{{ a", "{{ a"),
            ("{{ 'it\\'s [1:]' }}", "{{ 'it\\'s [1:]' }}"),
        ] {
            assert_eq!(prepare(source), expected);
        }
    }

    #[test]
    fn loops_check_what_they_go_over() {
        for (source, expected) in [
            ("{% for a in b %}", "{% for a in (b)|__iter__ %}"),
            ("{%- for a, b in c.items() if a in d -%}", "{%- for a, b in (c.items())|__iter__ if a in d -%}"),
            (
                "{% for a in (b if c else ' if ') recursive %}",
                "{% for a in ((b if c else ' if '))|__iter__ recursive %}",
            ),
            (
                "{% for a in b | selectattr('if', 'in', x) + c %}",
                "{% for a in (b | selectattr('if', 'in', x) + c)|__iter__ %}",
            ),
        ] {
            assert_eq!(prepare(source), expected);
        }
    }

    #[test]
    fn the_tag_generation_becomes_one_that_prints_its_body() {
        let source = "{%- generation -%}\r\n{{ generation }}{% endgeneration %}";
        assert_eq!(prepare(source), "{%- with -%}\n{{ generation }}{% endwith %}");
    }
}
