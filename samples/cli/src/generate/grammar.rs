//! The options that say what answers have to look like.

use std::path::Path;

use pagoda::Result;
use pagoda::engine::Grammar;

use super::read_text;

#[derive(clap::Args)]
#[group(multiple = false)]
pub struct GrammarArguments {
    /// Answers are JSON that is valid by this JSON Schema: the schema itself, or the file that has it.
    #[arg(long, value_name = "SCHEMA")]
    json_schema: Option<String>,
    /// Answers match this regular expression as a whole.
    #[arg(long, value_name = "REGEX")]
    regex: Option<String>,
    /// Answers are one of these texts; give it once for each.
    #[arg(long, value_name = "TEXT")]
    choice: Vec<String>,
    /// Answers follow the grammar in this file, in the syntax of Lark.
    #[arg(long, value_name = "FILE", value_hint = clap::ValueHint::FilePath)]
    lark: Option<String>,
}

impl GrammarArguments {
    /// The grammar, if one is given.
    pub fn grammar(&self) -> Result<Option<Grammar>> {
        let file = |path: &str| read_text(Path::new(path));
        Ok(match self {
            Self { json_schema: Some(schema), .. } if schema.trim_start().starts_with('{') => {
                Some(Grammar::JsonSchema(schema.clone()))
            }
            Self { json_schema: Some(path), .. } => Some(Grammar::JsonSchema(file(path)?)),
            Self { regex: Some(regex), .. } => Some(Grammar::Regex(regex.clone())),
            Self { lark: Some(path), .. } => Some(Grammar::Lark(file(path)?)),
            Self { choice, .. } => (!choice.is_empty()).then(|| Grammar::Choice(choice.clone())),
        })
    }
}
