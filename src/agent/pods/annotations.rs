//! Annotations of a pod: what it asks of Towline. Parsing needs no I/O, and refuses what it does not know: a misspelt annotation must
//! not start a training that nobody saves.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path};
use std::time::Duration;

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::placement::INPUTS_MAX;
use crate::selector::{Choice, Selector};
use crate::{size, span};

/// Beginning of the annotations.
const PREFIX: &str = "towline.dev/";
/// Settings of the sidecar, which the webhook writes and a volume shows as a file.
pub(in crate::agent) const SETTINGS: &str = "towline.dev/settings";
/// Certificates of the authorities, which a volume shows as a file.
pub(in crate::agent) const AUTHORITIES: &str = "towline.dev/authorities";
/// Steps and trees to restore: `RUN@latest`, `NAME -> /folder`.
const RESTORE: &str = "towline.dev/restore";
/// Folders to watch: `/folder`, `/folder -> RUN`.
const WATCH: &str = "towline.dev/watch";
const WARM: &str = "towline.dev/warm";
const STAGE: &str = "towline.dev/stage";
const STAGE_MEMORY: &str = "towline.dev/stage-memory";
const HINT: &str = "towline.dev/hint";
const CONTAINER: &str = "towline.dev/container";
const CREDENTIALS: &str = "towline.dev/credentials";
const GRACE: &str = "towline.dev/grace";
const CACHE: &str = "towline.dev/cache";
/// Names for hints alone, which the scheduler extender reads as well.
const INPUTS: &str = "towline.dev/inputs";
/// Set by the webhook when the affinity of the pod follows a hint.
pub(in crate::agent) const PLACED: &str = "towline.dev/placed";
/// Condition that the pod waits for before it is scheduled: `warm`.
const WAIT_FOR: &str = "towline.dev/gate";
/// Site at which its data is to be; the webhook sets it unless the pod does.
pub(in crate::agent) const WARM_AT: &str = "towline.dev/warm-at";
/// Set by the webhook when it has seen that the pod is to wait: it has a gate, or there is nothing to wait for yet.
pub(in crate::agent) const GATED: &str = "towline.dev/gated";
const KNOWN: [&str; 19] = [
    RESTORE,
    WATCH,
    WARM,
    STAGE,
    STAGE_MEMORY,
    HINT,
    CONTAINER,
    CREDENTIALS,
    GRACE,
    CACHE,
    INPUTS,
    "towline.dev/objective",
    "towline.dev/usd-per-hour",
    SETTINGS,
    AUTHORITIES,
    PLACED,
    WAIT_FOR,
    WARM_AT,
    GATED,
];
/// Annotations each of which needs the sidecar.
const NEED_SIDECAR: [&str; 4] = [RESTORE, WATCH, WARM, STAGE];
/// Annotations that say how the sidecar works.
const OF_SIDECAR: [&str; 5] = [STAGE_MEMORY, CONTAINER, CREDENTIALS, GRACE, CACHE];
/// Entries of one annotation, at most.
const ENTRIES_MAX: usize = 16;
/// Bytes of the annotations of a pod, at most, besides those that the webhook writes.
const ANNOTATIONS_LEN_MAX: usize = 32 << 10;
/// Bytes of a cache, at least.
const CACHE_MIN: u64 = 32 << 20;
/// Bytes of a path, at most: that of Linux, with its NUL.
const PATH_LEN_MAX: usize = 4095;
/// Folders of the sidecar, which are volumes of its own.
const RESERVED: [&str; 3] = ["/run/towline", "/etc/towline", "/var/lib/towline"];

/// Requests of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in crate::agent) struct PodAnnotations {
    /// Trees to restore before the training starts, with their folders.
    pub(in crate::agent) restore: Vec<(Selector, String)>,
    /// Folders whose checkpoints are saved, with their runs.
    pub(in crate::agent) watch: Vec<(String, Name)>,
    /// Names to fetch into the cache before the training starts.
    pub(in crate::agent) warm: Vec<Selector>,
    /// Names whose tensors are read into memory before the training starts.
    pub(in crate::agent) stage: Vec<Selector>,
    /// Memory for these, in bytes.
    pub(in crate::agent) stage_memory: Option<u64>,
    /// Use of the hint for the pod's placement.
    pub(in crate::agent) hint: Option<HintUse>,
    /// Further names that the hint is about.
    pub(in crate::agent) inputs: Vec<Selector>,
    /// Container that trains; else the first that mounts one of the folders.
    pub(in crate::agent) container: Option<String>,
    /// Secret of the pod's namespace that becomes the sidecar's environment.
    pub(in crate::agent) credentials: Option<String>,
    /// Time for the last saves.
    pub(in crate::agent) grace: Option<Duration>,
    /// Bytes of the sidecar's cache.
    pub(in crate::agent) cache: Option<u64>,
    /// True if the pod is scheduled once its data is at its site.
    pub(in crate::agent) gated: bool,
    /// Site at which its data is to be, if the pod or the webhook has named it.
    pub(in crate::agent) warm_at: Option<String>,
}

/// Names that a pod uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::agent) struct PodNames {
    /// Runs whose steps it saves.
    pub(in crate::agent) saves: BTreeSet<Name>,
    /// Names that it reads.
    pub(in crate::agent) reads: BTreeSet<Selector>,
}

/// Use of a hint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) enum HintUse {
    /// Only nodes of sites where the data may go.
    Required,
    /// Sites in the order of the hint.
    Preferred,
}

impl PodAnnotations {
    /// Reads the annotations of a pod; others than Towline's are ignored.
    ///
    /// # Errors
    /// Usage, for an unknown or malformed one, and for those that contradict each other.
    pub(in crate::agent) fn of(annotations: &BTreeMap<String, String>) -> Result<Self> {
        let own = annotations.keys().filter(|key| key.starts_with(PREFIX));
        if let Some(unknown) = own.into_iter().find(|key| !KNOWN.contains(&key.as_str())) {
            let known: Vec<&str> = KNOWN.iter().filter_map(|key| key.strip_prefix(PREFIX)).collect();
            return Err(Error::usage("annotation is unknown")
                .got(format!("{unknown:.100}"))
                .expected(known.join(", ")));
        }
        let is_empty = |key: &&&str| annotations.get(**key).is_some_and(|text| text.trim().is_empty());
        if let Some(key) = NEED_SIDECAR.iter().chain(&[WAIT_FOR]).find(is_empty) {
            return Err(Error::usage("annotation is empty").at(*key));
        }
        let get = |key: &'static str| Annotation { key, text: annotations.get(key).map_or("", |text| text.trim()) };
        let mut found = Self {
            warm: get(WARM).list(selector)?,
            stage: get(STAGE).list(selector)?,
            inputs: get(INPUTS).list_of(INPUTS_MAX, selector)?,
            stage_memory: get(STAGE_MEMORY).value(size::parse)?,
            cache: get(CACHE).value(size::parse)?,
            grace: get(GRACE).value(span::parse)?,
            container: get(CONTAINER).value(object_name)?,
            credentials: get(CREDENTIALS).value(object_name)?,
            hint: get(HINT).value(hint_use)?,
            gated: get(WAIT_FOR).value(gate)?.is_some(),
            warm_at: get(WARM_AT).value(site)?,
            ..Self::default()
        };
        let mut steps = Vec::new();
        for (name, folder) in get(RESTORE).list(|entry| arrow(entry, selector, folder))? {
            match folder {
                Some(folder) => found.restore.push((name, folder)),
                None => steps.push(name),
            }
        }
        let watched = get(WATCH).list(|entry| arrow(entry, folder, str::parse::<Name>))?;
        found.watch = runs_of(watched, &steps)?;
        found.check(annotations)?;
        Ok(found)
    }

    /// Drops annotations that say nothing of what a pod asks for.
    ///
    /// # Errors
    /// Usage, if the rest is too long to be kept.
    pub(in crate::agent) fn trim(annotations: &mut BTreeMap<String, String>) -> Result<()> {
        annotations.retain(|key, _| key.starts_with(PREFIX) && ![SETTINGS, AUTHORITIES].contains(&key.as_str()));
        if annotations.iter().map(|(key, text)| key.len() + text.len()).sum::<usize>() > ANNOTATIONS_LEN_MAX {
            return Err(Error::usage(format!("annotations are longer than {ANNOTATIONS_LEN_MAX} bytes")));
        }
        Ok(())
    }

    /// True if the pod needs the sidecar.
    pub(in crate::agent) fn need_sidecar(&self) -> bool {
        !(self.restore.is_empty() && self.watch.is_empty() && self.warm.is_empty() && self.stage.is_empty())
    }

    /// Folders that the training and the sidecar share.
    pub(in crate::agent) fn folders(&self) -> impl Iterator<Item = &str> {
        self.watch
            .iter()
            .map(|(folder, _)| folder)
            .chain(self.restore.iter().map(|(_, folder)| folder))
            .map(String::as_str)
    }

    /// All names that the pod uses.
    pub(in crate::agent) fn names(&self) -> PodNames {
        let latest = |(_, run): &(String, Name)| Selector::Step { run: run.clone(), choice: Choice::Latest };
        let reads = self.watch.iter().map(latest).chain(self.inputs().cloned()).collect();
        PodNames { saves: self.watch.iter().map(|(_, run)| run.clone()).collect(), reads }
    }

    fn inputs(&self) -> impl Iterator<Item = &Selector> {
        self.restore.iter().map(|(name, _)| name).chain(&self.warm).chain(&self.stage).chain(&self.inputs)
    }

    fn check(&self, annotations: &BTreeMap<String, String>) -> Result<()> {
        if !self.need_sidecar()
            && let Some(key) = OF_SIDECAR.iter().find(|key| annotations.contains_key(**key))
        {
            return Err(Error::usage("annotation has no effect alone")
                .at(*key)
                .expected(format!("one of {} as well", NEED_SIDECAR.join(", "))));
        }
        match (self.stage.is_empty(), self.stage_memory) {
            (false, None) => {
                return Err(Error::usage("tensors need memory to be read into")
                    .at(STAGE)
                    .expected(format!("{STAGE_MEMORY}: 20G, or whatever they take")));
            }
            (true, Some(_)) => return Err(Error::usage("there is nothing to read into memory").at(STAGE_MEMORY)),
            _ => {}
        }
        if self.cache.is_some_and(|cache| cache < CACHE_MIN) {
            return Err(Error::usage("cache is too small").at(CACHE).expected("at least 32M"));
        }
        for (at, (_, run)) in self.watch.iter().enumerate() {
            if self.watch[at + 1..].iter().any(|(_, other)| other == run) {
                return Err(Error::usage("two folders are watched for one run").at(WATCH).got(run));
            }
        }
        let folders: Vec<&str> = self.folders().collect();
        for (at, folder) in folders.iter().enumerate() {
            let clashes = |other: &&&str| Path::new(other).starts_with(folder) || Path::new(folder).starts_with(other);
            if let Some(other) = folders[at + 1..].iter().find(clashes) {
                return Err(Error::usage("folders lie within each other").got(format!("{folder:.200}, {other:.200}")));
            }
        }
        if self.gated && self.inputs().next().is_none() && self.watch.is_empty() {
            return Err(Error::usage("there is no data to wait for")
                .at(WAIT_FOR)
                .expected(format!("{INPUTS}, or {RESTORE}")));
        }
        if self.warm_at.is_some() && !self.gated {
            return Err(Error::usage("annotation has no effect alone")
                .at(WARM_AT)
                .expected(format!("{WAIT_FOR}: warm")));
        }
        if self.hint.is_some() && self.inputs().next().is_none() && self.watch.is_empty() {
            return Err(Error::usage("a hint needs names").at(HINT).expected(format!("{INPUTS}, or {RESTORE}")));
        }
        Ok(())
    }
}

/// Watched folders with their runs. A folder without one takes the run of the only step to restore.
fn runs_of(watched: Vec<(String, Option<Name>)>, steps: &[Selector]) -> Result<Vec<(String, Name)>> {
    let mut runs = Vec::with_capacity(steps.len());
    for step in steps {
        match step {
            Selector::Step { run, choice: Choice::Latest } => runs.push(run.clone()),
            other => {
                return Err(Error::usage("this needs a folder")
                    .at(RESTORE)
                    .got(other)
                    .expected("NAME -> /folder; only RUN@latest goes where the run is watched"));
            }
        }
    }
    let mut found = Vec::with_capacity(watched.len());
    for (folder, run) in watched {
        let run = match (run, runs.as_slice()) {
            (Some(run), _) => run,
            (None, [run]) => run.clone(),
            (None, _) => {
                return Err(Error::usage("watched folder has no run")
                    .at(WATCH)
                    .got(format!("{folder:.200}"))
                    .expected(format!("{folder:.200} -> RUN; or {RESTORE}: RUN@latest")));
            }
        };
        found.push((folder, run));
    }
    if let Some(run) = runs.iter().find(|run| !found.iter().any(|(_, other)| other == *run)) {
        return Err(Error::usage("no folder is watched for this run, so its step has no place")
            .at(RESTORE)
            .got(format!("{run}@latest"))
            .expected(format!("{WATCH}: /folder -> {run}; or {run}@latest -> /folder")));
    }
    Ok(found)
}

/// An annotation and its text, which is empty if there is none.
struct Annotation<'a> {
    key: &'static str,
    text: &'a str,
}

impl<'a> Annotation<'a> {
    fn value<T>(&self, parse: impl Fn(&'a str) -> Result<T>) -> Result<Option<T>> {
        if self.text.is_empty() {
            return Ok(None);
        }
        parse(self.text).map(Some).map_err(|error| self.malformed(&error))
    }

    /// Entries, separated by commas or lines.
    fn list<T>(&self, parse: impl Fn(&'a str) -> Result<T>) -> Result<Vec<T>> {
        self.list_of(ENTRIES_MAX, parse)
    }

    /// At most `max` entries.
    fn list_of<T>(&self, max: usize, parse: impl Fn(&'a str) -> Result<T>) -> Result<Vec<T>> {
        let entries = self.text.split([',', '\n']).map(str::trim).filter(|entry| !entry.is_empty());
        let entries: Vec<&str> = entries.take(max + 1).collect();
        if entries.len() > max {
            return Err(Error::usage("annotation is too long").at(self.key).expected(format!("at most {max} entries")));
        }
        entries.into_iter().map(|entry| parse(entry).map_err(|error| self.malformed(&error))).collect()
    }

    fn malformed(&self, error: &Error) -> Error {
        Error::usage(format!("annotation is malformed: {error}")).at(self.key)
    }
}

fn selector(text: &str) -> Result<Selector> {
    text.parse()
}

/// `LEFT -> RIGHT`, or `LEFT` alone.
fn arrow<L, R>(
    entry: &str,
    left: impl Fn(&str) -> Result<L>,
    right: impl Fn(&str) -> Result<R>,
) -> Result<(L, Option<R>)> {
    match entry.split_once("->") {
        None => Ok((left(entry)?, None)),
        Some((first, second)) => Ok((left(first.trim())?, Some(right(second.trim())?))),
    }
}

/// An absolute path that a volume can be mounted at.
fn folder(text: &str) -> Result<String> {
    let malformed =
        |expected: &'static str| Error::usage("this is no folder").got(format!("{text:.200}")).expected(expected);
    let path = Path::new(text);
    let plain = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    if !path.is_absolute() || !plain || text.len() > PATH_LEN_MAX || text.contains(|c: char| c.is_control() || c == ':')
    {
        return Err(malformed("an absolute path without .. and colons"));
    }
    let system = ["/proc", "/sys", "/dev"].iter().any(|system| path.starts_with(system));
    let reserved = RESERVED.iter().any(|own| path.starts_with(own) || Path::new(own).starts_with(path));
    if system || reserved {
        return Err(malformed("a folder that neither the system nor the sidecar uses"));
    }
    let normal: std::path::PathBuf = path.components().collect();
    normal.into_os_string().into_string().map_err(|_| malformed("UTF-8"))
}

/// Name of a container or a secret (<https://kubernetes.io/docs/concepts/overview/working-with-objects/names/>).
fn object_name(text: &str) -> Result<String> {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.".contains(&byte);
    if text.len() > 253 || !text.bytes().all(plain) {
        return Err(Error::usage("this is no name of an object").got(format!("{text:.100}")));
    }
    Ok(text.to_owned())
}

fn hint_use(text: &str) -> Result<HintUse> {
    match text {
        "required" => Ok(HintUse::Required),
        "preferred" => Ok(HintUse::Preferred),
        other => {
            Err(Error::usage("this is no use of a hint").expected("required or preferred").got(format!("{other:.100}")))
        }
    }
}

fn gate(text: &str) -> Result<()> {
    match text {
        "warm" => Ok(()),
        other => Err(Error::usage("pods cannot wait for this").expected("warm").got(format!("{other:.100}"))),
    }
}

fn site(text: &str) -> Result<String> {
    Identity::new(text, "any")?;
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(annotations: &[(&str, &str)]) -> Result<PodAnnotations> {
        let key = |key: &&str| if key.contains('/') { (*key).to_owned() } else { format!("{PREFIX}{key}") };
        PodAnnotations::of(&annotations.iter().map(|(name, text)| (key(name), (*text).to_owned())).collect())
    }

    fn refused(annotations: &[(&str, &str)]) -> String {
        let error = read(annotations).unwrap_err();
        format!("{error} {}", error.place().unwrap_or_default())
    }

    #[test]
    fn a_watched_folder_takes_the_run_of_the_step_to_restore() {
        let found = read(&[("restore", "run-7@latest"), ("watch", "/ckpt/")]).unwrap();
        assert_eq!(found.watch, [("/ckpt".to_owned(), "run-7".parse().unwrap())]);
        assert!(found.restore.is_empty() && found.need_sidecar());
        let found =
            read(&[("watch", "/a -> run-a, /b->run-b"), ("restore", "run-b@latest\ndata/v3 -> /data")]).unwrap();
        assert_eq!(found.folders().collect::<Vec<_>>(), ["/a", "/b", "/data"]);
        assert_eq!(found.inputs().map(ToString::to_string).collect::<Vec<_>>(), ["data/v3"]);
    }

    #[test]
    fn values_have_the_grammar_of_settings() {
        let found = read(&[
            ("stage", "run-7@min=loss, models/base"),
            ("stage-memory", "1.5G"),
            ("grace", "90s"),
            ("cache", "50G"),
            ("hint", " preferred "),
            ("container", "train"),
            ("credentials", "bucket"),
            ("kubernetes.io/other", "x"),
        ])
        .unwrap();
        assert_eq!(found.stage.len(), 2);
        assert_eq!((found.stage_memory, found.cache), (Some(3 << 29), Some(50 << 30)));
        assert_eq!((found.grace, found.hint), (Some(Duration::from_secs(90)), Some(HintUse::Preferred)));
        assert_eq!((found.container.as_deref(), found.credentials.as_deref()), (Some("train"), Some("bucket")));
        assert_eq!(read(&[]).unwrap(), PodAnnotations::default());
        assert!(!read(&[("inputs", "a, b"), ("objective", "cost")]).unwrap().need_sidecar());
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (annotations, told) in [
            (&[("whatch", "/ckpt")][..], "annotation is unknown"),
            (&[("watch", "/ckpt")], "watched folder has no run"),
            (&[("watch", "/c"), ("restore", "a@latest, b@latest")], "watched folder has no run"),
            (&[("restore", "run-7@latest")], "no folder is watched"),
            (&[("restore", "run-7@min=loss"), ("watch", "/c -> run-7")], "needs a folder"),
            (&[("restore", "models/base")], "needs a folder"),
            (&[("restore", "a@latest"), ("watch", "/c -> b")], "no folder is watched"),
            (&[("watch", "ckpt -> run")], "no folder"),
            (&[("watch", "/a/../b -> run")], "no folder"),
            (&[("watch", "/ -> run")], "no folder"),
            (&[("watch", "/run -> run")], "no folder"),
            (&[("watch", "/var/lib/towline/x -> run")], "no folder"),
            (&[("watch", "/proc/x -> run")], "no folder"),
            (&[("watch", "/a:b -> run")], "no folder"),
            (&[("watch", "/c -> run"), ("restore", "a -> /c/d")], "within each other"),
            (&[("watch", "/c -> "), ("restore", "a -> /d")], "malformed"),
            (&[("warm", "a//b")], "malformed"),
            (&[("stage", "a")], "memory"),
            (&[("warm", "a"), ("stage-memory", "1G")], "nothing to read"),
            (&[("hint", "maybe"), ("inputs", "a")], "required or preferred"),
            (&[("hint", "required")], "a hint needs names"),
            (&[("gate", "warm")], "no data to wait for"),
            (&[("gate", "true"), ("inputs", "a")], "pods cannot wait for this"),
            (&[("gate", "warm"), ("inputs", "a"), ("warm-at", "a/b")], "malformed"),
            (&[("warm-at", "cloud"), ("inputs", "a")], "no effect alone"),
            (&[("cache", "lots"), ("warm", "a")], "malformed"),
            (&[("credentials", "a b"), ("warm", "a")], "malformed"),
            (&[("grace", "10s")], "no effect alone"),
            (&[("warm", "a"), ("cache", "31M")], "too small"),
            (&[("watch", "/a -> new, /b -> new")], "two folders"),
        ] {
            let error = refused(annotations);
            assert!(error.contains(told), "{annotations:?}: {error}");
        }
        for text in ["", " ", "\n"] {
            assert!(refused(&[("watch", text)]).contains("annotation is empty"));
            assert!(refused(&[("gate", text), ("inputs", "a")]).contains("annotation is empty"));
        }
        let many = (0..17).map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
        assert!(refused(&[("warm", &many)]).contains("too long"));
        assert_eq!(read(&[("inputs", &many)]).unwrap().inputs.len(), 17, "as many as the scheduler extender takes");
    }
}
