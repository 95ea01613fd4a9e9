//! Saving a step by ranks: each saves its own files under the session that all share, and puts its part; whoever then sees
//! all parts makes the one commit.
//!
//! ```text
//! join (the log's session of this attempt) -> save -> part, created once -> all there? -> union -> commit and close
//! ```

mod union;

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use futures::{StreamExt as _, TryStreamExt as _, stream};
use serde::Serialize;

pub(in crate::ops) use self::union::facts;
use self::union::{Own, lacking, union};
use super::store::Counts;
use super::{Expected, SaveOptions, SaveReport, SaveSource, Saving};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Manifest;
use crate::id::{ManifestId, PackId, SessionId};
use crate::ops::names::{Replaced, exists};
use crate::ops::stopping::{unless_stopped, wind_up};
use crate::repository::log::{Attempt, AttemptId, Joint, RefValue};
use crate::repository::{
    Completed, JointTree, Name, Parts, RankPart, Repository, Saved, Standing, StoredChunks, Writer,
};
use crate::tree::coarse_now;

/// Times that a rank starts over because others were faster, or packs that it relied on went away.
const ATTEMPTS: usize = 5;
/// Trees of other ranks read at once.
const READS: usize = 8;

/// Part of a step to save.
#[derive(Clone, Debug)]
pub struct PartOptions {
    /// Rank whose files these are: below `ranks`.
    pub rank: u32,
    /// Number of ranks that save the step, each a part.
    pub ranks: NonZeroU32,
    /// Attempt: the same for all ranks, another whenever they start again with other content.
    pub attempt: AttemptId,
}

/// Result of saving a part.
#[derive(Clone, Debug, Serialize)]
pub struct PartReport {
    /// Report of the rank's own files; the manifest is that of the part.
    #[serde(flatten)]
    pub part: SaveReport,
    /// Rank.
    pub rank: u32,
    /// Of how many.
    pub ranks: u32,
    /// In which attempt.
    pub attempt: String,
    /// Every part is there: the step is saved, and the name stands for it.
    pub complete: bool,
    /// A rank whose part is not there yet; there may be more of them.
    pub waits_for: Option<u32>,
    /// The manifest of the whole step, once it is complete.
    pub step: Option<String>,
}

/// Outcome of one try of a part.
enum Turn {
    /// The rank's own value, and that of the step or the rank that it waits for.
    Done(Box<RefValue>, std::result::Result<Box<RefValue>, u32>),
    /// Something moved meanwhile.
    Again,
}

impl Repository {
    /// Saves `source`, a folder or files in memory, as one rank's part of the step `name`. The step is there once the parts of all ranks are: all
    /// paths of all of them, made visible in one commit by whoever finds the last; what only some ranks saved never is. May
    /// be called again, by any rank, and then finds what is there.
    ///
    /// # Errors
    /// Usage, if it is a file or the rank is none of so many; conflict, if this rank saved other content in this attempt, if
    /// two ranks have different things under one path, if the name moved since the attempt began, or if the attempt was ended
    /// because none of its ranks made progress for long; else as [`Repository::save`].
    ///
    /// # Cancel safety
    /// Safe: what was dropped is found by the next call for this rank and attempt.
    #[tracing::instrument(skip_all, fields(%name, rank = part.rank))]
    pub async fn save_part(
        &self,
        source: impl Into<SaveSource>,
        name: &Name,
        part: &PartOptions,
        options: &SaveOptions,
    ) -> Result<PartReport> {
        self.save_part_from(source.into(), name, part, options).await
    }

    async fn save_part_from(
        &self,
        source: SaveSource,
        name: &Name,
        part: &PartOptions,
        options: &SaveOptions,
    ) -> Result<PartReport> {
        let begun = Instant::now();
        let options = with_ranks(part, options)?;
        let attempt = Attempt { name: name.clone(), id: part.attempt.clone(), ranks: part.ranks };
        let started = coarse_now();
        let (walk, formats) = unless_stopped(&options.stop, self.look(source, &options)).await?;
        if walk.is_file() {
            let root = walk.root().unwrap_or(Path::new(""));
            return Err(Error::usage("a rank saves a folder").at(root.display()).got("a file"));
        }
        let state = self.state().await?;
        let before = state.refs.get(name).filter(|value| value.attempt.as_ref() != Some(&part.attempt));
        let parent = self.parent(&state, name, &options).await?;
        let derive = AtomicBool::new(true);
        let saving = Saving { repository: self, name, options: &options, walk, formats, parent, derive, started };
        let ranked = Ranked { saving, attempt, rank: part.rank };
        let (mut counts, mut stored_bytes) = (Counts::default(), 0);
        for _ in 0..ATTEMPTS {
            if let Turn::Done(own, step) = ranked.turn(&mut counts, &mut stored_bytes).await? {
                let seconds = begun.elapsed().as_secs_f64();
                // Files that an index names and this rank lacks belong to other ranks.
                counts.lacking.clear();
                let complete = step.as_ref().ok();
                let replaced = complete.and_then(|step| before.filter(|before| before.version != step.version));
                let own = ranked.saving.report(&own, counts, stored_bytes, seconds);
                return Ok(PartReport {
                    part: SaveReport { replaced: replaced.map(Replaced::of), ..own },
                    rank: part.rank,
                    ranks: part.ranks.get(),
                    attempt: part.attempt.to_string(),
                    complete: step.is_ok(),
                    waits_for: step.as_ref().err().copied(),
                    step: step.ok().map(|value| value.manifest.to_string()),
                });
            }
        }
        Err(Error::conflict("the attempt moves faster than this rank can follow")
            .at(name)
            .help("run the command again"))
    }
}

/// The options with the number of ranks among the facts.
fn with_ranks(part: &PartOptions, options: &SaveOptions) -> Result<SaveOptions> {
    let ranks = part.ranks;
    if part.rank >= ranks.get() {
        return Err(Error::usage("there is no such rank")
            .expected(format!("below {ranks}"))
            .got(part.rank)
            .help("ranks count from 0, and the world size is the number of all that save a part"));
    }
    if options.facts.ranks().is_some_and(|given| given != ranks) {
        return Err(Error::usage("the world size is the number of ranks that save").expected(ranks));
    }
    Ok(SaveOptions { facts: options.facts.clone().world_size(ranks), ..options.clone() })
}

/// One rank's save under way.
struct Ranked<'a> {
    saving: Saving<'a>,
    attempt: Attempt,
    rank: u32,
}

/// The rank's own tree, stored.
struct OwnTree {
    manifest: Manifest,
    id: ManifestId,
}

impl Ranked<'_> {
    fn repository(&self) -> &Repository {
        self.saving.repository
    }

    /// Finds out where the attempt stands, and does what there is to do.
    async fn turn(&self, counts: &mut Counts, stored_bytes: &mut u64) -> Result<Turn> {
        if self.saving.options.expected == Expected::Nothing {
            let state = self.repository().state().await?;
            if state.standing(&self.attempt) == Standing::Absent && state.refs.contains_key(&self.attempt.name) {
                return Err(exists(&self.attempt.name));
            }
        }
        let standing = self.repository().join(&self.attempt).await?;
        let mut writer = match &standing {
            Standing::Open(session, _) => Writer::within(self.repository(), &self.saving.options.progress, *session),
            _ => Writer::new(self.repository(), &self.saving.options.progress),
        };
        let turn = match &standing {
            Standing::Open(session, joint) => self.contribute((*session, joint), &mut writer, counts).await,
            Standing::Complete(value) => self.compare(value, &mut writer, counts).await,
            Standing::Absent => Ok(Turn::Again),
        };
        *stored_bytes += writer.stored_bytes();
        let turn = match turn {
            Err(error) => {
                let what = format!("the save of {}", self.at());
                Err(wind_up(&mut writer, &self.saving.options.stop, what, error).await)
            }
            Ok(done) => {
                if let Err(left) = writer.give_up().await {
                    tracing::debug!("what was uploaded is left to the collector: {left:?}");
                }
                Ok(done)
            }
        };
        match turn {
            // Objects of a closed session may be gone.
            Err(error) if matches!(error.kind(), ErrorKind::Conflict | ErrorKind::NotFound) => {
                self.outpaced(standing, error).await
            }
            other => other,
        }
    }

    /// A refusal may only say that others were faster.
    async fn outpaced(&self, before: Standing, error: Error) -> Result<Turn> {
        let now = self.repository().state().await?.standing(&self.attempt);
        match (before, now) {
            (Standing::Open(..), Standing::Complete(_)) => Ok(Turn::Again),
            (Standing::Open(session, _), Standing::Open(now, _)) if session != now => Ok(Turn::Again),
            (Standing::Open(..), Standing::Absent) => Err(self.ended().source(error)),
            _ => Err(error),
        }
    }

    /// Saves the rank's tree under the shared session, puts its part, and makes the step complete if it was the last.
    async fn contribute(
        &self,
        (session, joint): (SessionId, &Joint),
        writer: &mut Writer,
        counts: &mut Counts,
    ) -> Result<Turn> {
        let mut known = StoredChunks::load(self.repository()).await?;
        if self.saving.options.expected == Expected::Nothing && joint.expected.is_some() {
            return Err(exists(&self.attempt.name));
        }
        if known.state().version(&self.attempt.name) != joint.expected {
            return Err(self.moved());
        }
        let current = known.state().refs.get(&self.attempt.name).cloned();
        self.saving.add_base(&mut known, current.as_ref()).await?;
        let Some((manifest, ids, places)) = self.saving.tree(&mut known, writer, counts).await? else {
            return Ok(Turn::Again);
        };
        let (id, body) = manifest.encode();
        let own = OwnTree { manifest, id };
        let part = match self.repository().part(session, self.rank).await? {
            Some(there) => there,
            None => {
                let ((manifest_key, map_key), map) = writer.deposit((id, &ids, &places), &body, &known).await?;
                // A part cannot be taken back: rather look now than have it spoil the step.
                let foreign = map.packs.iter().map(|pack| pack.id).filter(|pack| pack.session != session).collect();
                let now = self.repository().state().await?;
                if now.vouch(&foreign, known.state().seq).is_err() {
                    return Ok(Turn::Again);
                }
                let value = RefValue {
                    version: 0,
                    manifest: id,
                    manifest_key,
                    map_key,
                    saved: self.repository().clock().now(),
                    logical_bytes: own.manifest.logical_bytes(),
                    files: own.manifest.files().count() as u64,
                    chunks: ids.len() as u64,
                    behind: self.saving.behind(&places),
                    facts: self.saving.options.facts.clone(),
                    attempt: Some(self.attempt.id.clone()),
                };
                self.repository()
                    .put_part(session, &RankPart { rank: self.rank, known: known.state().seq, value })
                    .await?
            }
        };
        self.check_same(&part.value, &own).await?;
        self.saving.remember(id, &body);
        self.finish(session, joint, part).await
    }

    /// The part that counts for this rank must hold what the rank holds now.
    async fn check_same(&self, part: &RefValue, own: &OwnTree) -> Result<()> {
        if part.manifest == own.id {
            return Ok(());
        }
        let saved = self.repository().saved_as(&self.attempt.name, part).await?;
        let differs = lacking(&saved.manifest, &own.manifest).or_else(|| lacking(&own.manifest, &saved.manifest));
        differs.map_or(Ok(()), |differs| Err(self.other_content(differs)))
    }

    /// Makes the step complete if every part is there.
    async fn finish(&self, session: SessionId, joint: &Joint, part: RankPart) -> Result<Turn> {
        let parts = match self.repository().parts(session, self.rank, self.attempt.ranks.get()).await? {
            Parts::All(parts) => parts,
            Parts::Missing(rank) => {
                // Under a session that is over, what is there is nothing.
                return match self.repository().state().await?.standing(&self.attempt) {
                    Standing::Open(now, _) if now == session => Ok(Turn::Done(Box::new(part.value), Err(rank))),
                    Standing::Absent => Err(self.ended()),
                    _ => Ok(Turn::Again),
                };
            }
        };
        self.saving.options.progress.phase("joining", 0);
        let trees = parts.iter().map(|part| self.repository().saved_as(&self.attempt.name, &part.value));
        let trees = stream::iter(trees.collect::<Vec<_>>()).buffered(READS).try_collect::<Vec<Saved>>().await?;
        let own: Vec<Own<'_>> =
            parts.iter().zip(&trees).map(|(part, tree)| Own { rank: part.rank, manifest: &tree.manifest }).collect();
        let whole = union(&own)?;
        let (manifest, body) = whole.encode();
        let value = RefValue {
            manifest,
            saved: self.repository().clock().now(),
            logical_bytes: whole.logical_bytes(),
            files: whole.files().count() as u64,
            chunks: whole.chunks.ids.len() as u64,
            behind: parts.iter().map(|part| part.value.behind).max().unwrap_or(0),
            facts: facts(parts.iter().map(|part| &part.value.facts))?,
            ..part.value.clone()
        };
        let known = parts.iter().map(|part| part.known).min().unwrap_or(0);
        let tree = JointTree { body: &body, chunks: &whole.chunks.ids, parts: &trees, known, value };
        match self.repository().complete(session, joint, tree).await? {
            Completed::Done(step) => Ok(Turn::Done(Box::new(part.value), Ok(step))),
            Completed::Over => Ok(Turn::Again),
            Completed::Moved => Err(self.moved()),
            Completed::Lost(packs) => Err(self.lost(&packs)),
        }
    }

    /// The step is complete: it must hold what this rank holds now.
    async fn compare(&self, step: &RefValue, writer: &mut Writer, counts: &mut Counts) -> Result<Turn> {
        let mut known = StoredChunks::load(self.repository()).await?;
        let saved = self.repository().saved_as(&self.attempt.name, step).await?;
        known.add(&saved);
        let Some((manifest, ids, _)) = self.saving.tree(&mut known, writer, counts).await? else {
            return Ok(Turn::Again);
        };
        if let Some(differs) = lacking(&saved.manifest, &manifest) {
            return Err(self.other_content(differs));
        }
        let (id, body) = manifest.encode();
        self.saving.remember(id, &body);
        let (logical_bytes, files) = (manifest.logical_bytes(), manifest.files().count() as u64);
        let own = RefValue { manifest: id, logical_bytes, files, chunks: ids.len() as u64, ..step.clone() };
        Ok(Turn::Done(Box::new(own), Ok(Box::new(step.clone()))))
    }

    fn at(&self) -> String {
        format!("{} (rank {} of {}, attempt {})", self.attempt.name, self.rank, self.attempt.ranks, self.attempt.id)
    }

    fn other_content(&self, (path, how): (String, &'static str)) -> Error {
        Error::conflict("this rank saved something else in this attempt")
            .at(self.at())
            .got(format!("{path}: {how}"))
            .help("attempts are never mixed: save again on all ranks, with another `--attempt`")
    }

    fn moved(&self) -> Error {
        Error::conflict("the name moved since this attempt began")
            .at(self.at())
            .help("look at it (`towline show`), then save again on all ranks with another `--attempt`")
    }

    fn ended(&self) -> Error {
        Error::conflict("the attempt was ended: none of its ranks made progress for long")
            .at(self.at())
            .help("save again on all ranks: what was uploaded is used again")
    }

    fn lost(&self, packs: &[PackId]) -> Error {
        Error::conflict("packs that this attempt relied on were damaged or collected")
            .at(self.at())
            .got(format!("{} packs", packs.len()))
            .help("save again on all ranks, with another `--attempt`")
    }
}
