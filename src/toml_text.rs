//! TOML files that people write: errors with their line, and settings that are a text or a list.

use serde::Deserialize;

use crate::error::Error;

/// A text, or a list of texts.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(untagged)]
pub(crate) enum OneOrSeveral {
    One(String),
    Several(Vec<String>),
    #[default]
    #[serde(skip)]
    None,
}

impl OneOrSeveral {
    /// The texts.
    pub(crate) fn list(self) -> Vec<String> {
        match self {
            Self::One(text) => vec![text],
            Self::Several(texts) => texts,
            Self::None => Vec::new(),
        }
    }
}

/// The error about a `text` that is not the TOML that it should be.
pub(crate) fn malformed(what: &'static str, text: &str, error: &toml::de::Error) -> Error {
    let at = error.span().map_or_else(|| at_line(text, 0), |span| at_line(text, span.start));
    Error::usage(what).at(at).got(error.message().trim().to_owned())
}

/// The line at `offset`, as errors name it.
pub(crate) fn at_line(text: &str, offset: usize) -> String {
    format!("line {}", line(text, offset))
}

/// Beginnings of the lines of a text, for many lookups.
pub(crate) struct LineStarts(Vec<usize>);

impl LineStarts {
    pub(crate) fn of(text: &str) -> Self {
        Self(text.bytes().enumerate().filter(|(_, byte)| *byte == b'\n').map(|(at, _)| at + 1).collect())
    }

    /// As [`line()`].
    pub(crate) fn line(&self, offset: usize) -> usize {
        self.0.partition_point(|start| *start <= offset) + 1
    }
}

/// Number of the line at `offset`, from 1.
pub(crate) fn line(text: &str, offset: usize) -> usize {
    text.as_bytes().iter().take(offset).filter(|byte| **byte == b'\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_found_by_their_starts() {
        let text = "a\n\nbc\nd";
        let starts = LineStarts::of(text);
        for offset in 0..=text.len() {
            assert_eq!(starts.line(offset), line(text, offset), "{offset}");
        }
    }
}
