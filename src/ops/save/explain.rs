//! Explanation of a save: how each tensor, and each file without tensors, is stored, and why.

use std::collections::BTreeMap;

use serde::Serialize;

use super::assemble::Assembly;
use super::encode::EncodedChunk;
use super::parent::{BaseCandidate, NoParent};
use crate::codec::Codec;
use crate::ops::shown;
use crate::tree::Walk;

/// Storage of one tensor, or of a file or range without tensors.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explained {
    /// The file.
    pub path: String,
    /// Name of the tensor; None for bytes outside of tensors. Small tensors that share chunks are reported under the first of
    /// them.
    pub tensor: Option<String>,
    /// Bytes read of it.
    pub bytes: u64,
    /// Chunks that were in the repository already.
    pub here_bytes: u64,
    /// Bytes that the others are stored in. A bundle counts for the tensor that was read first.
    pub stored_bytes: u64,
    /// Encodings with reasons, the most frequent first, each with its number of chunks.
    pub reasons: Vec<String>,
}

/// Encoding of a chunk, with its reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Reason {
    Here,
    Derived,
    Difference,
    /// Part of a bundle that is predicted.
    Predicted,
    /// Part of a bundle that is stored whole, or that another chunk was stored with.
    Bundled,
    Alone(&'static str, NoBaseReason),
}

/// Reason why a chunk is stored without a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum NoBaseReason {
    /// Its bytes are not numbers.
    NoNumbers,
    NoTensor,
    Unusable,
    NotWorth,
    Far,
    First,
    KeyStep,
    Off,
    /// The repository accepts bytes faster than they are encoded.
    Faster,
    Unfit,
    Stricter,
}

/// Sums of one tensor so far.
#[derive(Debug, Default)]
struct Row {
    bytes: u64,
    here_bytes: u64,
    stored_bytes: u64,
    reasons: BTreeMap<Reason, u64>,
}

/// Collects the storage of chunks during a save.
#[derive(Debug)]
pub(super) struct Explanation {
    rows: BTreeMap<(usize, Option<usize>), Row>,
    no_parent: Option<NoParent>,
}

impl Explanation {
    pub(super) fn new(no_parent: Option<NoParent>) -> Self {
        Self { rows: BTreeMap::new(), no_parent }
    }

    /// Records a chunk that was in the repository already.
    pub(super) fn present(&mut self, assembly: &Assembly, file: usize, start: u64, len: u64) {
        let row = self.rows.entry((file, assembly.tensor_at(file, start))).or_default();
        row.bytes += len;
        row.here_bytes += len;
        *row.reasons.entry(Reason::Here).or_default() += 1;
    }

    /// Records a chunk that is stored in a bundle, whose bytes count for another one.
    pub(super) fn bundled(&mut self, assembly: &Assembly, file: usize, start: u64, len: u64) {
        let row = self.rows.entry((file, assembly.tensor_at(file, start))).or_default();
        row.bytes += len;
        *row.reasons.entry(Reason::Bundled).or_default() += 1;
    }

    /// Records a chunk that was stored.
    pub(super) fn done(&mut self, assembly: &Assembly, done: &EncodedChunk) {
        let reason = match done.form.encoded.codec {
            Codec::Derived => Reason::Derived,
            Codec::Difference => Reason::Difference,
            Codec::Part if done.is_predicted() => Reason::Predicted,
            Codec::Part => Reason::Bundled,
            codec => Reason::Alone(codec.word(), self.why(done)),
        };
        let row = self.rows.entry((done.file, assembly.tensor_at(done.file, done.start))).or_default();
        row.bytes += u64::from(done.form.plain_len);
        let bundle = done.bundle.as_ref().and_then(|bundle| bundle.whole.as_ref());
        let bundle = bundle.map_or(0, |whole| whole.encoded.bytes.len());
        row.stored_bytes += (done.form.encoded.bytes.len() + bundle) as u64;
        *row.reasons.entry(reason).or_default() += 1;
    }

    fn why(&self, done: &EncodedChunk) -> NoBaseReason {
        match (self.no_parent, done.base) {
            (Some(NoParent::Off), _) => NoBaseReason::Off,
            _ if done.faster => NoBaseReason::Faster,
            _ if !done.numbers => NoBaseReason::NoNumbers,
            (Some(NoParent::First), _) => NoBaseReason::First,
            (Some(NoParent::KeyStep), _) => NoBaseReason::KeyStep,
            (Some(NoParent::Unfit), _) => NoBaseReason::Unfit,
            (Some(NoParent::Stricter), _) => NoBaseReason::Stricter,
            (None, BaseCandidate::NoTensor) => NoBaseReason::NoTensor,
            (None, BaseCandidate::Unusable) => NoBaseReason::Unusable,
            (None, BaseCandidate::Far) => NoBaseReason::Far,
            (None, BaseCandidate::Chunk(_) | BaseCandidate::NotWorth) => NoBaseReason::NotWorth,
        }
    }

    /// Report in the order of the files; `parent` is the name of the parent.
    pub(super) fn finish(self, walk: &Walk, assembly: &Assembly, parent: Option<&str>) -> Vec<Explained> {
        let explained = |((file, tensor), row): ((usize, Option<usize>), Row)| {
            let path = walk.found.get(file).map(|found| shown(&found.path)).unwrap_or_default();
            let mut reasons: Vec<(Reason, u64)> = row.reasons.into_iter().collect();
            reasons.sort_by_key(|(_, count)| std::cmp::Reverse(*count));
            let counted = reasons.into_iter().map(|(reason, count)| {
                let text = reason.text(parent.unwrap_or("the earlier step"));
                if count == 1 { text } else { format!("{text} ({count})") }
            });
            Explained {
                path,
                tensor: tensor.and_then(|tensor| assembly.tensor_name(file, tensor)).map(str::to_owned),
                bytes: row.bytes,
                here_bytes: row.here_bytes,
                stored_bytes: row.stored_bytes,
                reasons: counted.collect(),
            }
        };
        self.rows.into_iter().map(explained).collect()
    }
}

impl Reason {
    fn text(self, parent: &str) -> String {
        let (codec, why) = match self {
            Self::Here => return "here already".to_owned(),
            Self::Derived => return "derived: it is the rounding of another tensor".to_owned(),
            Self::Difference => return format!("difference to {parent}"),
            Self::Predicted => return format!("in a bundle with its optimizer state, predicted from {parent}"),
            Self::Bundled => return "in a bundle with its optimizer state".to_owned(),
            Self::Alone(codec, why) => (codec, why),
        };
        match why {
            NoBaseReason::NoNumbers => codec.to_owned(),
            NoBaseReason::NoTensor => format!("{codec}: {parent} has no such tensor"),
            NoBaseReason::Unusable => format!("{codec}: the chunk of {parent} cannot be a base"),
            NoBaseReason::NotWorth => format!("{codec}: the difference to {parent} would not save enough"),
            NoBaseReason::Far => format!("{codec}: the differences of {parent} to its base are too large"),
            NoBaseReason::First => format!("{codec}: there is no earlier step"),
            NoBaseReason::KeyStep => format!("{codec}: a key step"),
            NoBaseReason::Off => format!("{codec}: compression is off"),
            NoBaseReason::Faster => format!("{codec}: the repository accepts bytes faster than they are compressed"),
            NoBaseReason::Stricter => format!("{codec}: the earlier step has stricter labels"),
            NoBaseReason::Unfit => format!("{codec}: the earlier step has no tensors, or cannot be read"),
        }
    }
}
