//! The messages of a conversation, and the file that keeps them.

use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use pagoda::json::Json;
use pagoda::{Error, Result, Status};
use pagoda_requests::generate::read_messages;
use serde::{Serialize, Serializer};
use serde_json::{Value, json};

/// The longest name of a file that all file systems take, with room for what is added to it.
const LONGEST_NAME: usize = 200;

/// A message of a chat.
pub fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}

/// A conversation.
pub struct Conversation {
    messages: Vec<Value>,
    system: Option<String>,
    /// Where it is kept, if it is.
    file: Option<PathBuf>,
}

impl Conversation {
    /// A new conversation; or, with a store, the one of this session that was kept beside it.
    pub fn open(system: Option<String>, store: Option<&Path>, session: &str) -> Result<Self> {
        let file = store.map(|store| file_of(store, session)).transpose()?;
        let mut conversation = Self { messages: Vec::new(), system, file };
        conversation.begin();
        if let Some(file) = conversation.file.clone()
            && let Some(messages) = read(&file)?
        {
            conversation.messages = messages;
        }
        Ok(conversation)
    }

    /// The messages, oldest first.
    pub fn messages(&self) -> &[Value] {
        &self.messages
    }

    /// The file that keeps it.
    pub fn file(&self) -> Option<&Path> {
        self.file.as_deref()
    }

    /// Whether there is more than a system message.
    pub fn has_turns(&self) -> bool {
        self.messages.iter().any(|message| message["role"] != "system")
    }

    /// Whether a system message was asked for and the conversation has another one, or none.
    pub fn is_system_ignored(&self) -> bool {
        self.system.as_ref().is_some_and(|system| self.messages.first() != Some(&message("system", system)))
    }

    /// Adds a message and its answer.
    pub fn add(&mut self, user: &str, assistant: &str) -> Result<()> {
        self.messages.extend([message("user", user), message("assistant", assistant)]);
        self.keep()
    }

    /// Begins anew.
    pub fn reset(&mut self) -> Result<()> {
        self.begin();
        self.keep()
    }

    /// Writes it to a file.
    pub fn save(&self, file: &Path) -> Result<()> {
        write(file, &self.messages)
    }

    /// Replaces it by that of a file.
    pub fn load(&mut self, file: &Path) -> Result<()> {
        let missing = || Error::new(Status::NotFound, format!("{} does not exist", file.display())).about("/load");
        self.messages = read(file)?.ok_or_else(missing)?;
        self.keep()
    }

    fn begin(&mut self) {
        self.messages = self.system.iter().map(|system| message("system", system)).collect();
    }

    fn keep(&self) -> Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        if let Some(folder) = file.parent() {
            fs::create_dir_all(folder).map_err(|error| failed(folder, "made", &error))?;
        }
        write(file, &self.messages)
    }
}

/// `STORE.chats/SESSION.json`. Characters that file names may not have are written as in addresses, `%2F`.
fn file_of(store: &Path, session: &str) -> Result<PathBuf> {
    if session.is_empty() {
        return Err(Error::invalid("--session", "it is empty: leave it out, or give the conversation a name"));
    }
    let Some(name) = store.file_name() else {
        return Err(Error::invalid("--store", format!("{} has no name of its own", store.display())));
    };
    let mut file = String::new();
    for byte in session.bytes() {
        // Not a dot at the beginning, which would hide the file, or name a folder.
        match byte {
            b'.' if file.is_empty() => file += "%2E",
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => file.push(byte.into()),
            _ => file += &format!("%{byte:02X}"),
        }
    }
    if file.len() > LONGEST_NAME {
        let message = format!("{} bytes are too many for the name of a file: choose a shorter name", file.len());
        return Err(Error::invalid("--session", message));
    }
    let mut folder = name.to_owned();
    folder.push(".chats");
    Ok(store.with_file_name(folder).join(file + ".json"))
}

/// The messages in a file; `None` if there is no file.
fn read(file: &Path) -> Result<Option<Vec<Value>>> {
    let text = match fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(file, "read", &error)),
    };
    let name = file.display().to_string();
    let json: Json =
        serde_json::from_str(&text).map_err(|error| Error::invalid(&name, format!("not a conversation: {error}")))?;
    // What was reset has no messages.
    if json == Json::List(Vec::new()) {
        return Ok(Some(Vec::new()));
    }
    read_messages("messages", &json).map(Some).map_err(|error| Error::invalid(&name, error.to_string()))
}

/// Replaces a file as a whole: after a crash it has the old messages or the new ones.
fn write(file: &Path, messages: &[Value]) -> Result<()> {
    let ordered: Vec<Ordered> = messages.iter().map(Ordered).collect();
    let text = serde_json::to_string_pretty(&ordered);
    let text = text.map_err(|error| Error::new(Status::Internal, format!("messages can not be JSON: {error}")))? + "\n";
    let Some(name) = file.file_name() else {
        return Err(Error::invalid(file.display().to_string(), "this names no file"));
    };
    let mut temporary = std::ffi::OsString::from(".");
    temporary.push(name);
    temporary.push(format!(".{}", std::process::id()));
    let temporary = file.with_file_name(temporary);
    let written = File::create(&temporary)
        .and_then(|mut out| out.write_all(text.as_bytes()).and_then(|()| out.sync_all()))
        .and_then(|()| fs::rename(&temporary, file))
        // The name is in the folder, which has to reach the disk too.
        .and_then(|()| match file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            Some(folder) => File::open(folder)?.sync_all(),
            None => File::open(".")?.sync_all(),
        });
    written.map_err(|error| {
        let _ = fs::remove_file(&temporary);
        failed(file, "written", &error)
    })
}

fn failed(path: &Path, what: &str, error: &std::io::Error) -> Error {
    Error::new(Status::Io, format!("{} can not be {what}: {error}", path.display()))
}

/// A message with its role first, as people read it.
struct Ordered<'a>(&'a Value);

impl Serialize for Ordered<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let Value::Object(members) = self.0 else { return self.0.serialize(serializer) };
        let first = ["role", "content"].into_iter().filter_map(|name| members.get_key_value(name));
        let rest = members.iter().filter(|(name, _)| !["role", "content"].contains(&name.as_str()));
        serializer.collect_map(first.chain(rest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_beside_the_store() {
        let file = |session: &str| file_of(Path::new("/var/chats"), session).map(|file| file.display().to_string());
        assert_eq!(file("anna").unwrap(), "/var/chats.chats/anna.json");
        assert_eq!(file("../ü b.c").unwrap(), "/var/chats.chats/%2E.%2F%C3%BC%20b.c.json");
        assert_eq!(file_of(Path::new("kept/"), "a").unwrap(), Path::new("kept.chats/a.json"));
        assert!(file("").is_err() && file(&"a".repeat(201)).is_err());
        assert!(file_of(Path::new("/"), "a").is_err());
    }

    #[test]
    fn a_conversation_is_kept_and_goes_on() {
        let folder = std::env::temp_dir().join(format!("pagoda-chat-{}", std::process::id()));
        fs::create_dir_all(&folder).unwrap();
        let open = |system: Option<&str>| Conversation::open(system.map(str::to_owned), Some(&folder.join("s")), "a");
        let mut first = open(Some("Be brief.")).unwrap();
        assert!(!first.has_turns());
        first.add("Hello", "Hi").unwrap();
        let second = open(Some("Be long.")).unwrap();
        assert!(second.has_turns() && second.is_system_ignored());
        let expected = [message("system", "Be brief."), message("user", "Hello"), message("assistant", "Hi")];
        assert_eq!(second.messages(), expected);
        let text = fs::read_to_string(second.file().unwrap()).unwrap();
        assert!(text.starts_with("[\n  {\n    \"role\": \"system\",\n    \"content\": \"Be brief.\"\n  },"), "{text}");
        let names: Vec<_> =
            fs::read_dir(folder.join("s.chats")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["a.json"]);

        fs::write(folder.join("s.chats/a.json"), "{").unwrap();
        let error = open(None).map(|_| ()).unwrap_err().to_string();
        assert!(error.contains("a.json: not a conversation"), "{error}");
        fs::write(folder.join("s.chats/a.json"), "[{}]").unwrap();
        assert!(open(None).map(|_| ()).unwrap_err().to_string().contains("messages[0]"));
        fs::remove_dir_all(&folder).unwrap();
    }
}
