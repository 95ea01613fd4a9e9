//! Selectors of tensors and boxes: `[PATH:]GLOB[BOX]`.

use std::fmt;
use std::str::FromStr;

use super::globals::Global;
use crate::checkpoint::boxes::{Shard, Slices, TensorBox};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::pattern::{PathMatcher, Pattern};

/// A selection of tensors by name, with an optional box of each. As text `[PATH:]GLOB[BOX]`, such as
/// `layers.*.weight[0:128, :]` or `model-0*.safetensors:lm_head.weight`:
///
/// - GLOB is a name, or a [pattern](crate::pattern); a `*` stands for dots and slashes, too.
/// - PATH, up to the first colon, is a file or folder, or a pattern of one; for a tensor in parts, the folder of the files.
/// - BOX is a bracket at the end that contains a colon: [`Slices`].
#[derive(Clone, Debug)]
pub struct TensorSelector {
    name: Pattern,
    path: Option<Pattern>,
    slices: Slices,
    shard: Option<Shard>,
}

impl TensorSelector {
    /// Selects whole tensors whose name is, or matches, `glob`.
    ///
    /// # Errors
    /// Usage, if that is no pattern.
    pub fn new(glob: &str) -> Result<Self> {
        Ok(Self { name: Pattern::of_tensor(glob)?, path: None, slices: Slices::default(), shard: None })
    }

    /// Selects whole tensors with exactly this `name`.
    #[must_use]
    pub fn named(name: &str) -> Self {
        Self { name: Pattern::exact(name), path: None, slices: Slices::default(), shard: None }
    }

    /// Restricts the selection to exactly this file, or to this folder and its content.
    #[must_use]
    pub fn at_path(self, path: &str) -> Self {
        Self { path: Some(Pattern::exact(if path == "." { "" } else { path })), ..self }
    }

    /// Restricts the selection to files or folders whose path is, or matches, `glob`.
    ///
    /// # Errors
    /// Usage, if that is no pattern.
    pub fn in_path(mut self, glob: &str) -> Result<Self> {
        self.path = Some(Pattern::of_path(glob)?);
        Ok(self)
    }

    /// Selects only this box of each.
    #[must_use]
    pub fn slices(self, slices: Slices) -> Self {
        Self { slices, ..self }
    }

    /// Selects only this shard of each, or of the box of each.
    #[must_use]
    pub fn shard(self, shard: Shard) -> Self {
        Self { shard: Some(shard), ..self }
    }

    /// True if it selects whole tensors.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.slices == Slices::default() && self.shard.is_none()
    }

    /// Box that it selects in a tensor of `shape`.
    ///
    /// # Errors
    /// Usage, if the box is outside of the tensor.
    pub(super) fn box_of(&self, shape: &[u64]) -> Result<TensorBox> {
        let found = self.slices.within(shape)?;
        Ok(match &self.shard {
            Some(shard) => shard.within(found),
            None => found,
        })
    }
}

impl FromStr for TensorSelector {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bracket = if text.ends_with(']') { text.rfind('[') } else { None };
        let (rest, slices) = match bracket.and_then(|at| text.split_at_checked(at)) {
            Some((rest, slices)) if slices.contains(':') => (rest, slices.parse()?),
            _ => (text, Slices::default()),
        };
        let selector = match rest.split_once(':') {
            Some((path, glob)) if !glob.is_empty() => Self::new(glob)?.in_path(path)?,
            None if !rest.is_empty() => Self::new(rest)?,
            _ => {
                return Err(Error::usage("no tensor is named")
                    .expected("[PATH:]GLOB[BOX]")
                    .got(text)
                    .help("'*' stands for every tensor, as in '*[0:128]'"));
            }
        };
        Ok(selector.slices(slices))
    }
}

impl fmt::Display for TensorSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(path) = &self.path {
            write!(f, "{}:", if path.text().is_empty() { "." } else { path.text() })?;
        }
        f.write_str(self.name.text())?;
        if self.slices == Slices::default() { Ok(()) } else { self.slices.fmt(f) }
    }
}

/// Index of tensors by name and path, built at the first lookup of a name without a pattern; sorted.
#[derive(Debug, Default)]
pub(super) struct Index<'m>(Option<Vec<Indexed<'m>>>);

/// A tensor, by its name and the path of its file, or of the folder of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Indexed<'m> {
    name: &'m str,
    path: &'m [u8],
    /// Number of the tensor.
    at: usize,
}

impl<'m> Index<'m> {
    /// Numbers of the tensors that `selector` selects in the tree `name`, at or below the path `below`.
    ///
    /// # Errors
    /// Not found, if there are none.
    pub(super) fn matching(
        &mut self,
        globals: &[Global<'m>],
        selector: &TensorSelector,
        name: &Name,
        below: Option<&[u8]>,
    ) -> Result<Vec<usize>> {
        let mut chosen = selector.path.as_ref().map(|pattern| PathMatcher::new(|path: &[u8]| pattern.takes(path)));
        let mut takes_path = |path: &[u8]| {
            below.is_none_or(|below| is_below(path, below)) && chosen.as_mut().is_none_or(|chosen| chosen.takes(path))
        };
        let found: Vec<usize> = if selector.name.is_plain() {
            let near = near(self.0.get_or_insert_with(|| indexed(globals)), selector);
            let mut found: Vec<usize> = near.filter(|one| takes_path(one.path)).map(|one| one.at).collect();
            found.sort_unstable();
            found
        } else {
            let mut takes =
                |global: &Global<'_>| takes_path(global.path) && selector.name.takes(global.name.as_bytes());
            (0..).zip(globals).filter(|(_, global)| takes(global)).map(|(at, _)| at).collect()
        };
        if !found.is_empty() {
            return Ok(found);
        }
        let missing = Error::not_found("there is no such tensor").at(format!("{name}, {selector}"));
        Err(missing.help(if globals.is_empty() {
            format!("no file of it was understood as a checkpoint when it was saved: `towline show {name} --files` tells how each was cut")
        } else {
            format!("`towline tensors {name}` lists them; rows are asked for as [0:8], with a colon")
        }))
    }
}

fn indexed<'m>(globals: &[Global<'m>]) -> Vec<Indexed<'m>> {
    let one = |(at, global): (usize, &Global<'m>)| Indexed { name: global.name, path: global.path, at };
    let mut all: Vec<Indexed<'m>> = globals.iter().enumerate().map(one).collect();
    all.sort_unstable();
    all
}

/// True if `path` is the file or folder `folder`, or below it; all paths are below the empty one.
fn is_below(path: &[u8], folder: &[u8]) -> bool {
    folder.is_empty() || path.strip_prefix(folder).is_some_and(|rest| matches!(rest, [] | [b'/', ..]))
}

/// Tensors of `all` that `selector` may take by its exact name: if its path is no pattern, only those at or below that, as a tree may
/// have very many others of the name.
fn near<'a, 'm>(
    all: &'a [Indexed<'m>],
    selector: &TensorSelector,
) -> impl Iterator<Item = &'a Indexed<'m>> + use<'a, 'm> {
    let name = selector.name.text();
    let from = |path: &[u8]| all.partition_point(|one| (one.name, one.path) < (name, path));
    let ranges = match selector.path.as_ref().filter(|path| path.is_plain()) {
        Some(path) => {
            let after = |last: &str| from(&[path.text(), last].concat().into_bytes());
            // Paths below it have a slash next, of which '0' is the successor.
            [after("")..after("\0"), after("/")..after("0")]
        }
        None => [from(b"")..all.partition_point(|one| one.name <= name), 0..0],
    };
    ranges.into_iter().flat_map(|range| all.get(range).unwrap_or_default())
}
