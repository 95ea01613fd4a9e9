//! Scopes of a token: the rights of its bearer at the API of an agent, with the names and folders they apply to.

use std::collections::BTreeSet;
use std::path::{Component, Path};

use crate::error::{Error, Result};
use crate::name::Name;
use crate::pattern::Pattern;

/// Maximum number of scopes of one token.
const SCOPES_MAX: usize = 64;
/// Maximum length of a scope's text.
const SCOPE_LEN_MAX: usize = 1024;
/// List of scopes for errors.
const KNOWN: &str = "read=PATTERN, save=PATTERN, folder=DIR, warm, pins, metrics or admin";

/// Right of a token, independent of names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// Read and list names that a pattern allows.
    Read,
    /// Save names that a pattern allows, from allowed folders.
    Save,
    /// Warm names that may be read.
    Warm,
    /// Pin names that may be read.
    Pins,
    /// Read statistics of the agent, its cache and its peers.
    Metrics,
    /// Do everything.
    Admin,
}

impl Scope {
    /// Name in a scope's text.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Save => "save",
            Self::Warm => "warm",
            Self::Pins => "pins",
            Self::Metrics => "metrics",
            Self::Admin => "admin",
        }
    }
}

/// Scopes of a token: at least one.
#[derive(Clone, Debug)]
pub struct Scopes {
    given: BTreeSet<Scope>,
    read: Vec<Pattern>,
    save: Vec<Pattern>,
    /// Absolute paths, without `.` and `..`.
    folders: BTreeSet<String>,
}

impl Scopes {
    /// Parses `texts`: `read=PATTERN`, `save=PATTERN`, `folder=DIR`, `warm`, `pins`, `metrics`, `admin`.
    ///
    /// # Errors
    /// Usage, for none, too many, an unknown or malformed one, or one that allows nothing without another.
    pub fn of<S: AsRef<str>>(texts: &[S]) -> Result<Self> {
        if texts.len() > SCOPES_MAX {
            return Err(Error::usage("token has too many scopes")
                .expected(format!("at most {SCOPES_MAX}"))
                .got(texts.len())
                .help("a pattern such as read={run-7,run-8}/** stands for several"));
        }
        let mut scopes = Self { given: BTreeSet::new(), read: Vec::new(), save: Vec::new(), folders: BTreeSet::new() };
        for text in texts {
            scopes.add(text.as_ref())?;
        }
        scopes.check()?;
        Ok(scopes)
    }

    fn add(&mut self, text: &str) -> Result<()> {
        if text.len() > SCOPE_LEN_MAX {
            return Err(Error::usage("scope is too long")
                .expected(format!("at most {SCOPE_LEN_MAX} bytes"))
                .got(text.len())
                .help("use several patterns"));
        }
        let (word, value) = text.split_once('=').map_or((text, None), |(word, value)| (word, Some(value)));
        match (word, value) {
            ("read", Some(pattern)) => add_pattern(&mut self.read, pattern)?,
            ("save", Some(pattern)) => add_pattern(&mut self.save, pattern)?,
            ("folder", Some(folder)) => {
                check_folder(folder)?;
                self.folders.insert(folder.to_owned());
            }
            _ => {}
        }
        let scope = match (word, value) {
            ("read", Some(_)) => Scope::Read,
            ("save", Some(_)) => Scope::Save,
            ("folder", Some(_)) => return Ok(()),
            ("warm", None) => Scope::Warm,
            ("pins", None) => Scope::Pins,
            ("metrics", None) => Scope::Metrics,
            ("admin", None) => Scope::Admin,
            _ => return Err(unknown(text)),
        };
        self.given.insert(scope);
        Ok(())
    }

    /// Refuses scopes that allow nothing, since they are a mistake.
    fn check(&self) -> Result<()> {
        let useless = |what: &'static str, help: &'static str| Err(Error::usage(what).help(help));
        if self.given.is_empty() && self.folders.is_empty() {
            return Err(Error::usage("token has no scope").expected(KNOWN).help("give only the scopes that it needs"));
        }
        if self.is_admin() {
            return Ok(());
        }
        let reads = self.has(Scope::Read);
        if !reads && (self.has(Scope::Warm) || self.has(Scope::Pins)) {
            return useless("warm and pins allow nothing without a name to read", "add read=PATTERN");
        }
        if self.has(Scope::Save) && self.folders.is_empty() {
            return useless("save allows nothing without a folder to save from", "add folder=DIR");
        }
        if !self.has(Scope::Save) && !self.folders.is_empty() {
            return useless("folder allows nothing without a name to save", "add save=PATTERN");
        }
        Ok(())
    }

    /// True if everything is allowed.
    #[must_use]
    pub fn is_admin(&self) -> bool {
        self.given.contains(&Scope::Admin)
    }

    /// True if `scope` was given, or everything is allowed.
    #[must_use]
    pub fn has(&self, scope: Scope) -> bool {
        self.is_admin() || self.given.contains(&scope)
    }

    /// True if `name` may be read and listed.
    #[must_use]
    pub fn may_read(&self, name: &Name) -> bool {
        self.is_admin() || takes(&self.read, name)
    }

    /// True if `name` may be saved or replaced.
    #[must_use]
    pub fn may_save(&self, name: &Name) -> bool {
        self.is_admin() || takes(&self.save, name)
    }

    /// True if `path` is at or below an allowed folder by its text. The caller must check for links.
    #[must_use]
    pub fn may_name(&self, path: &Path) -> bool {
        let plain = is_plain(path);
        self.is_admin() || plain && self.folders.iter().any(|folder| path.starts_with(folder))
    }

    /// The scopes as texts that [`Scopes::of`] reads, sorted by kind.
    #[must_use]
    pub fn texts(&self) -> Vec<String> {
        let read = self.read.iter().map(|pattern| format!("read={}", pattern.text()));
        let save = self.save.iter().map(|pattern| format!("save={}", pattern.text()));
        let folders = self.folders.iter().map(|folder| format!("folder={folder}"));
        let words = self.given.iter().filter(|scope| !matches!(scope, Scope::Read | Scope::Save));
        read.chain(save).chain(folders).chain(words.map(|scope| scope.word().to_owned())).collect()
    }
}

fn add_pattern(patterns: &mut Vec<Pattern>, text: &str) -> Result<()> {
    if text.is_empty() {
        return Err(Error::usage("pattern of a scope is empty").help("** stands for every name"));
    }
    if patterns.iter().all(|pattern| pattern.text() != text) {
        patterns.push(Pattern::new(text)?);
    }
    Ok(())
}

fn takes(patterns: &[Pattern], name: &Name) -> bool {
    patterns.iter().any(|pattern| pattern.takes(name.as_str().as_bytes()))
}

fn check_folder(folder: &str) -> Result<()> {
    if is_plain(Path::new(folder)) {
        return Ok(());
    }
    Err(Error::usage("folder of a scope is not a plain absolute path")
        .expected("a path from / on, without . and ..")
        .got(format!("{folder:?}")))
}

/// True for an absolute path without `.` and `..`. A `.` that is not the first component is dropped by the path's own grammar.
fn is_plain(path: &Path) -> bool {
    path.is_absolute() && path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)))
}

fn unknown(text: &str) -> Error {
    let shown: String = text.chars().take(64).collect();
    Error::usage("unknown scope").expected(KNOWN).got(format!("{shown:?}")).help("for example: read=run-7/**")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    fn name(text: &str) -> Name {
        text.parse().unwrap()
    }

    fn of(texts: &[&str]) -> Scopes {
        Scopes::of(texts).unwrap()
    }

    #[test]
    fn each_scope_allows_its_own_and_nothing_else() {
        let scopes = of(&["read=run-7/**", "read=models/*", "save=run-7/step-*", "folder=/ckpt/run-7", "warm"]);
        for (text, reads, saves) in [
            ("run-7/step-1", true, true),
            ("run-7/a/b", true, false),
            ("run-7", false, false),
            ("run-70/step-1", false, false),
            ("models/base", true, false),
            ("models/base/x", false, false),
        ] {
            assert_eq!((scopes.may_read(&name(text)), scopes.may_save(&name(text))), (reads, saves), "{text}");
        }
        assert!(scopes.has(Scope::Read) && scopes.has(Scope::Save) && scopes.has(Scope::Warm));
        for scope in [Scope::Pins, Scope::Metrics, Scope::Admin] {
            assert!(!scopes.has(scope), "{scope:?}");
        }
        assert!(!of(&["metrics"]).may_read(&name("a")) && !of(&["metrics"]).may_save(&name("a")));
    }

    #[test]
    fn folders_are_compared_by_whole_segments() {
        let scopes = of(&["save=**", "folder=/ckpt/run-7"]);
        for (path, expected) in [
            ("/ckpt/run-7", true),
            ("/ckpt/run-7/step-1", true),
            ("/ckpt/run-7/../run-8", false),
            ("/ckpt/run-70", false),
            ("/ckpt", false),
            ("ckpt/run-7", false),
        ] {
            assert_eq!(scopes.may_name(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn admin_allows_everything() {
        let scopes = of(&["admin"]);
        for scope in [Scope::Read, Scope::Save, Scope::Warm, Scope::Pins, Scope::Metrics, Scope::Admin] {
            assert!(scopes.has(scope), "{scope:?}");
        }
        assert!(scopes.may_read(&name("a")) && scopes.may_save(&name("a")) && scopes.may_name(Path::new("/etc")));
    }

    #[test]
    fn scopes_that_make_no_sense_are_refused() {
        let many: Vec<String> = (0..=SCOPES_MAX).map(|n| format!("read=run-{n}/**")).collect();
        assert_eq!(Scopes::of(&many).unwrap_err().kind(), ErrorKind::Usage);
        let long = format!("read={}", "a".repeat(SCOPE_LEN_MAX));
        for texts in [
            &[][..],
            &["everything"],
            &["read"],
            &["read="],
            &["read=["],
            &["warm=a", "read=a"],
            &["warm"],
            &["pins"],
            &["save=run/**"],
            &["folder=/ckpt"],
            &["read=a", "folder=/ckpt"],
            &["save=a", "folder=ckpt"],
            &["save=a", "folder=/ckpt/../etc"],
            &["save=a", "folder="],
            &[long.as_str()],
        ] {
            assert_eq!(Scopes::of(texts).unwrap_err().kind(), ErrorKind::Usage, "{texts:?}");
        }
    }

    /// Valid combinations of scopes.
    fn texts() -> impl Strategy<Value = Vec<String>> {
        let pattern = "[a-z0-9]{1,8}(/[a-z*?=-]{1,8}){0,3}(/\\*\\*)?";
        let reads = prop::collection::vec(pattern.prop_map(|text| format!("read={text}")), 1..5);
        let saves = prop::collection::vec(pattern.prop_map(|text| format!("save={text}")), 1..5);
        let folders = prop::collection::vec("(/[a-z=. ]{2,8}x){1,3}".prop_map(|text| format!("folder={text}")), 1..4);
        let words = prop::collection::vec(prop::sample::select(vec!["warm", "pins", "metrics", "admin"]), 0..5);
        let words = words.prop_map(|words| words.into_iter().map(str::to_owned).collect::<Vec<_>>());
        (reads, saves, folders, words)
            .prop_map(|(reads, saves, folders, words)| [reads, saves, folders, words].concat())
    }

    proptest! {
        #[test]
        fn scopes_that_are_shown_are_read_again(texts in texts(), probe in "[a-z0-9]{1,8}(/[a-z-]{1,8}){0,3}") {
            let scopes = Scopes::of(&texts).unwrap();
            let again = Scopes::of(&scopes.texts()).unwrap();
            prop_assert_eq!(again.texts(), scopes.texts());
            prop_assert_eq!(&again.given, &scopes.given);
            let given: BTreeSet<String> = texts.into_iter().collect();
            prop_assert_eq!(scopes.texts().into_iter().collect::<BTreeSet<_>>(), given);
            let probe = name(&probe);
            prop_assert_eq!(again.may_read(&probe), scopes.may_read(&probe));
            prop_assert_eq!(again.may_save(&probe), scopes.may_save(&probe));
        }

        #[test]
        fn no_text_is_too_odd_to_be_judged(texts in prop::collection::vec(".{0,40}", 0..4)) {
            if let Ok(scopes) = Scopes::of(&texts) {
                prop_assert!(Scopes::of(&scopes.texts()).is_ok());
            }
        }
    }
}
