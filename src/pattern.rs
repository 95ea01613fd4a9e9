//! Patterns of names, agents and paths: `*`, `**`, `?`, `[a-z]` and `{a,b}`.
//!
//! Segments end at `/`. `*`, `?` and `[a-z]` stay within one; `**` as a whole segment stands for any number of them. In names of
//! tensors a `/` is a character like others, which they take, too.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;

use globset::{GlobBuilder, GlobMatcher};
use serde::Deserialize;

use crate::error::{Error, Result};

/// Maximum depth of braces in a pattern.
const BRACES_DEPTH_MAX: usize = 16;

/// A text, or a pattern of texts.
#[derive(Clone, Debug)]
pub struct Pattern {
    text: String,
    /// None if it is not a pattern but that very text.
    glob: Option<GlobMatcher>,
}

impl Pattern {
    /// The pattern that `text` spells.
    ///
    /// # Errors
    /// Usage, if `text` is malformed.
    pub fn new(text: &str) -> Result<Self> {
        Self::built(text, true)
    }

    /// The pattern of names of tensors that `text` spells: its `*`, `?` and classes take a `/` as well.
    ///
    /// # Errors
    /// As [`Pattern::new`].
    pub fn of_tensor(text: &str) -> Result<Self> {
        Self::built(text, false)
    }

    fn built(text: &str, has_segments: bool) -> Result<Self> {
        if !Self::has_wildcard(text) {
            return Ok(Self::exact(text));
        }
        let depth = text.bytes().scan(0_usize, |depth, byte| {
            *depth = if byte == b'{' { *depth + 1 } else { depth.saturating_sub(usize::from(byte == b'}')) };
            Some(*depth)
        });
        // The parser of patterns recurses.
        if depth.max() > Some(BRACES_DEPTH_MAX) {
            return Err(Error::usage("pattern has too many braces within each other")
                .at(format!("{text:.80}"))
                .expected(format!("at most {BRACES_DEPTH_MAX}")));
        }
        let apart = if has_segments {
            classes_within_segments(text).map_err(|what| Error::usage(what).at(text))?
        } else {
            text.to_owned()
        };
        let built = GlobBuilder::new(&apart).literal_separator(has_segments).backslash_escape(true).build();
        let glob = built.map_err(|error| Error::usage("malformed pattern").at(text).source(error))?;
        Ok(Self { text: text.to_owned(), glob: Some(glob.compile_matcher()) })
    }

    /// True if `text` may match more than itself.
    #[must_use]
    pub fn has_wildcard(text: &str) -> bool {
        text.contains(['*', '?', '[', ']', '{', '}', '\\'])
    }

    /// A pattern of paths; `./a/` means `a`, and `.` all.
    ///
    /// # Errors
    /// As [`Pattern::new`].
    pub fn of_path(text: &str) -> Result<Self> {
        let path = text.trim_start_matches("./").trim_end_matches('/');
        Self::new(if path == "." { "" } else { path })
    }

    /// A pattern that matches this text alone.
    #[must_use]
    pub fn exact(text: &str) -> Self {
        Self { text: text.to_owned(), glob: None }
    }

    /// As it was written.
    #[must_use]
    pub fn text(&self) -> &str {
        &self.text
    }

    /// True if it matches `name`. A name equal to the pattern's text always matches: names may hold brackets.
    #[must_use]
    pub fn takes(&self, name: &[u8]) -> bool {
        let matches = |glob: &GlobMatcher| glob.is_match(OsStr::from_bytes(name));
        self.text.as_bytes() == name || self.glob.as_ref().is_some_and(matches)
    }

    /// True if it matches one name only.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.glob.is_none()
    }
}

/// Selection of paths that match, or that have a folder above them that does. Paths in the order of a tree cost about one match
/// each, not one for each folder above each of them.
#[derive(Debug)]
pub struct PathMatcher<F> {
    matches: F,
    /// The last path, with a slash behind it.
    last: Vec<u8>,
    /// Length of the first part of the last path that matches: a folder above it, or all of it.
    found: Option<usize>,
}

impl<F: FnMut(&[u8]) -> bool> PathMatcher<F> {
    /// Selects the paths for which `matches` holds, and those below them.
    pub fn new(matches: F) -> Self {
        Self { matches, last: Vec::new(), found: None }
    }

    /// True if the file or folder `path` matches, or a folder above it.
    pub fn takes(&mut self, path: &[u8]) -> bool {
        let Self { matches, last, found } = self;
        let parts = path.iter().chain(b"/");
        let shared = parts.clone().zip(&*last).take_while(|(byte, before)| byte == before).count();
        last.truncate(shared);
        last.extend(parts.skip(shared));
        // Folders within the shared part are known.
        if found.is_none_or(|len| len >= shared) {
            let mut ends = last.iter().enumerate().skip(shared).filter(|(_, byte)| **byte == b'/').map(|(at, _)| at);
            *found = ends.find(|&end| last.get(..end).is_some_and(&mut *matches));
        }
        found.is_some()
    }
}

/// `text` with classes that never take a `/`, which those of globset do.
///
/// # Errors
/// An error for a class that has a `/`.
fn classes_within_segments(text: &str) -> Result<String, &'static str> {
    let (mut made, mut rest) = (String::with_capacity(text.len() + 1), text);
    while let Some(at) = rest.find(['[', '\\']) {
        let (before, from) = rest.split_at(at);
        made.push_str(before);
        if let Some(escaped) = from.strip_prefix('\\') {
            let len = 1 + escaped.chars().next().map_or(0, char::len_utf8);
            made.push_str(&from[..len]);
            rest = &from[len..];
            continue;
        }
        let inner = from[1..].trim_start_matches(['!', '^']);
        let negated = inner.len() + 1 < from.len();
        // A bracket that comes first is one of the class.
        let first = usize::from(inner.starts_with(']'));
        let Some(end) = inner[first..].find(']').map(|end| first + end) else { break };
        let members: Vec<char> = inner[..end].chars().collect();
        let takes_slash = members.contains(&'/')
            || members.windows(3).any(|three| three[1] == '-' && (three[0]..=three[2]).contains(&'/'));
        if takes_slash && !negated {
            return Err("a class of a pattern takes a slash, which ends a segment");
        }
        made.push_str(if negated { "[!" } else { "[" });
        made.push_str(&inner[..end]);
        // At the end it is part of no range but after a dash, which then stands first.
        if negated && !takes_slash {
            if inner[..end].ends_with('-') {
                return Err("a negated class of a pattern ends with a dash: put it first");
            }
            made.push('/');
        }
        made.push(']');
        rest = &inner[end + 1..];
    }
    made.push_str(rest);
    Ok(made)
}

/// Several patterns; in settings a text, or a list of texts.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "Written")]
pub struct Patterns(Vec<Pattern>);

/// Patterns as they are written.
#[derive(Deserialize)]
#[serde(untagged, expecting = "a pattern, or a list of patterns")]
enum Written {
    One(String),
    Several(Vec<String>),
}

impl TryFrom<Written> for Patterns {
    type Error = Error;

    fn try_from(written: Written) -> Result<Self> {
        match written {
            Written::One(text) => Self::of(&[text]),
            Written::Several(texts) => Self::of(&texts),
        }
    }
}

impl Patterns {
    /// The patterns that `texts` spell.
    ///
    /// # Errors
    /// Usage, if one is malformed.
    pub fn of<S: AsRef<str>>(texts: &[S]) -> Result<Self> {
        texts.iter().map(|text| Pattern::new(text.as_ref())).collect::<Result<_>>().map(Self)
    }

    /// True if one of them matches `name`.
    #[must_use]
    pub fn take(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.takes(name.as_bytes()))
    }

    /// True if there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The patterns, as they were written.
    #[must_use]
    pub fn texts(&self) -> Vec<&str> {
        self.0.iter().map(Pattern::text).collect()
    }

    /// Patterns that match one text only.
    pub fn plain(&self) -> impl Iterator<Item = &str> {
        self.0.iter().filter(|pattern| pattern.is_plain()).map(Pattern::text)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn braces_are_not_followed_to_the_end_of_the_stack() {
        let deep = |depth: usize| Pattern::new(&format!("{}a{}", "{".repeat(depth), "}".repeat(depth)));
        assert!(deep(BRACES_DEPTH_MAX).is_ok());
        assert!(deep(BRACES_DEPTH_MAX + 1).is_err() && deep(100_000).is_err());
    }

    #[test]
    fn a_star_is_one_segment_and_two_are_any_number() {
        for (pattern, name, expected) in [
            ("*", "run", true),
            ("*", "run/step-1", false),
            ("**", "run/step-1", true),
            ("**", "run", true),
            ("run/*", "run/step-1", true),
            ("run/*", "run/a/step-1", false),
            ("run/**", "run/a/step-1", true),
            ("run/**", "run", false),
            ("**/step-*", "a/b/step-1", true),
            ("**/step-*", "step-1", true),
            ("cloud/*", "cloud/a", true),
            ("cloud/*", "cloud2/a", false),
            ("run?x", "run/x", false),
            ("run[!a]x", "run/x", false),
            ("run[!a]x", "runbx", true),
            ("run[!a-c]x", "runbx", false),
            ("run[]a]", "run]", true),
            ("run\\[!a]", "run[!a]", true),
            ("[a-c]/[^0-9]", "b/x", true),
            ("run-*", "run-7/step-1", false),
        ] {
            assert_eq!(Pattern::new(pattern).unwrap().takes(name.as_bytes()), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn a_pattern_of_paths_takes_what_lies_below() {
        for (pattern, path, expected) in [
            ("a/b", "a/b", true),
            ("a", "a/b/c", true),
            ("./a/", "a/b", true),
            ("a", "ab", false),
            ("*.bin", "x.bin", true),
            ("*.bin", "sub/x.bin", false),
            ("**/*.bin", "sub/x.bin", true),
            ("s*", "sub/x.bin", true),
            ("{a,b}/c?", "b/c1", true),
            ("a[1]", "a[1]", true),
        ] {
            let pattern = Pattern::of_path(pattern).unwrap();
            let takes = PathMatcher::new(|path| pattern.takes(path)).takes(path.as_bytes());
            assert_eq!(takes, expected, "{} {path}", pattern.text());
        }
        for malformed in ["[", "a[/]b", "a[+-9]b", "a[!b-]"] {
            assert_eq!(Pattern::of_path(malformed).unwrap_err().kind(), crate::error::ErrorKind::Usage, "{malformed}");
        }
    }

    #[test]
    fn a_folder_is_matched_once_for_all_below_it() {
        let folders: Vec<String> = (1..=100).map(|depth| vec!["d"; depth].join("/")).collect();
        let deepest = folders.last().unwrap();
        let files = (100..300).map(|file| format!("{deepest}/{file}"));
        let paths: Vec<String> = folders.iter().cloned().chain(files).collect();
        let mut matches = 0;
        let mut matcher = PathMatcher::new(|path| {
            matches += 1;
            path.ends_with(b"/150")
        });
        let taken: Vec<&String> = paths.iter().filter(|path| matcher.takes(path.as_bytes())).collect();
        assert_eq!(taken, [&format!("{deepest}/150")]);
        assert_eq!(matches, paths.len());
    }

    proptest! {
        #[test]
        fn paths_match_as_each_alone(
            pattern in prop::sample::select(vec!["**", "*", "a", "a/b", "**/b", "*/b", "a/**/b", "{a,ab}/*", "", "[ab]"]),
            paths in prop::collection::vec("(a|b|ab|a-|/){0,5}", 0..40),
            is_sorted in any::<bool>(),
        ) {
            let mut paths = paths;
            if is_sorted {
                paths.sort();
            }
            let pattern = Pattern::of_path(pattern).unwrap();
            let mut matcher = PathMatcher::new(|path| pattern.takes(path));
            for path in paths {
                let above = path.match_indices('/').map(|(at, _)| at);
                let expected = above.chain([path.len()]).any(|end| pattern.takes(&path.as_bytes()[..end]));
                prop_assert_eq!(matcher.takes(path.as_bytes()), expected, "{} {}", pattern.text(), path);
            }
        }
    }

    #[test]
    fn a_slash_is_a_character_of_names_of_tensors() {
        for (pattern, name, expected) in [
            ("*", "params/dense/kernel", true),
            ("**", "params/dense/kernel", true),
            ("params/*", "params/dense/kernel", true),
            ("params*", "params/dense/kernel", true),
            ("*kernel", "params/dense/kernel", true),
            ("a?b", "a/b", true),
            ("a[./]b", "a/b", true),
            ("a[!.]b", "a/b", true),
            ("a[!/]b", "a/b", false),
            ("params/*/bias", "params/dense/kernel", false),
        ] {
            assert_eq!(Pattern::of_tensor(pattern).unwrap().takes(name.as_bytes()), expected, "{pattern} {name}");
        }
    }

    #[test]
    fn a_setting_is_one_pattern_or_a_list() {
        #[derive(Deserialize)]
        struct Settings {
            names: Patterns,
        }
        let read = |text: &str| toml::from_str::<Settings>(text).map(|settings| settings.names);
        for text in ["names = 'run/*'", "names = ['other', 'run/*']"] {
            let names = read(text).unwrap();
            assert!(names.take("run/a") && !names.take("run/a/b"), "{text}");
        }
        assert!(read("names = []").unwrap().is_empty());
        for (text, says) in [("names = '['", "malformed pattern"), ("names = 1", "a pattern, or a list of patterns")] {
            let error = read(text).unwrap_err().to_string();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
