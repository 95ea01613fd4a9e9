//! The index of a checkpoint in several safetensors files: JSON with the file of each tensor.
//!
//! Facts: `save_pretrained` of <https://github.com/huggingface/transformers> writes `model.safetensors.index.json` beside the
//! files as `{"metadata": {"total_size": ...}, "weight_map": {"<tensor>": "<file>", ...}}`. Each file lists its own tensors, so
//! the index is only used to find missing files.

use std::collections::{BTreeMap, BTreeSet};

use serde::Deserialize;
use thiserror::Error;

/// Suffix of the name of an index.
pub const INDEX_NAME: &str = ".safetensors.index.json";
/// Maximum bytes of an index: several hundred thousand tensors.
pub const INDEX_LEN_MAX: u64 = 64 << 20;

/// Reason why a file is no index.
#[derive(Debug, Error)]
#[error("not the index of a sharded checkpoint")]
pub struct ParseError(#[from] serde_json::Error);

/// Tensors of each file, in the folder of the index.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Index {
    /// Tensors, by file.
    pub files: BTreeMap<String, BTreeSet<String>>,
}

impl Index {
    /// Approximate bytes of memory.
    #[must_use]
    pub fn weight(&self) -> u64 {
        let text = |text: &String| (size_of::<String>() + text.len()) as u64;
        let files = self.files.iter().map(|(file, tensors)| text(file) + tensors.iter().map(text).sum::<u64>());
        // Nodes of the trees are a half full at least.
        2 * files.sum::<u64>()
    }
}

#[derive(Deserialize)]
struct Json {
    weight_map: BTreeMap<String, String>,
}

/// Reads an index of at most [`INDEX_LEN_MAX`] bytes.
///
/// # Errors
/// It is longer, or no valid index.
pub fn parse(bytes: &[u8]) -> Result<Index, ParseError> {
    if bytes.len() as u64 > INDEX_LEN_MAX {
        return Err(ParseError(serde::de::Error::custom("it is too long")));
    }
    let Json { weight_map } = serde_json::from_slice(bytes)?;
    let mut index = Index::default();
    for (tensor, file) in weight_map {
        index.files.entry(file).or_default().insert(tensor);
    }
    Ok(index)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_index_says_which_file_holds_what() {
        let text = br#"{"metadata": {"total_size": 9}, "weight_map": {"b": "2.safetensors", "a": "1.safetensors", "c": "2.safetensors"}}"#;
        let index = parse(text).unwrap();
        let files: Vec<(&str, Vec<&str>)> =
            index.files.iter().map(|(file, of)| (file.as_str(), of.iter().map(String::as_str).collect())).collect();
        assert_eq!(files, [("1.safetensors", vec!["a"]), ("2.safetensors", vec!["b", "c"])]);
    }

    #[test]
    fn what_is_not_looked_at_may_be_anything() {
        let deep = format!(r#"{{"x": {}1{}, "weight_map": {{}}}}"#, "[".repeat(50_000), "]".repeat(50_000));
        assert_eq!(parse(deep.as_bytes()).unwrap(), Index::default());
    }

    #[test]
    fn anything_else_is_none() {
        for text in
            ["", "[]", "{}", r#"{"weight_map": 1}"#, r#"{"weight_map": {"a": 1}}"#, r#"{"weight_map": {"a": "b"}"#]
        {
            assert!(parse(text.as_bytes()).is_err(), "{text}");
        }
    }
}
