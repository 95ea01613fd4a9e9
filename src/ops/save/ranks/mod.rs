//! Saving a step by ranks: each rank saves its own files under a shared session and stores its part; the rank that finds all
//! parts present makes the single commit.
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
use self::union::{RankTree, lacking, union};
use super::store::Counts;
use super::{Expected, ParentQuery, SaveOptions, SaveReport, SaveSource, Saving};
use crate::error::{Error, ErrorKind, Result};
use crate::format::Manifest;
use crate::id::{ManifestId, PackId, SessionId};
use crate::name::Name;
use crate::ops::names::{Replaced, exists};
use crate::ops::stopping::{end_stopped, unless_stopped};
use crate::policy::Labels;
use crate::repository::log::{Attempt, AttemptId, Joint, RefValue};
use crate::repository::{AttemptState, Completed, JointTree, Parts, PlacedTree, RankPart, Repository, Saved, Writer};
use crate::tree::coarse_now;

/// Limit of restarts of a rank because other ranks were faster, or packs that it relied on are gone.
const ATTEMPTS: usize = 5;
/// Number of trees of other ranks that are read concurrently.
const READS: usize = 8;

/// Part of a step to save.
#[derive(Clone, Debug)]
pub struct PartOptions {
    /// Rank of these files, below `ranks`.
    pub rank: u32,
    /// Number of ranks; each saves one part. Ranks that save several count as one for each, and the attempt says their number
    /// ([`AttemptId::says_parts`]).
    pub ranks: NonZeroU32,
    /// Attempt: the same for all ranks; a new one is needed to save other content.
    pub attempt: AttemptId,
}

/// Result of saving a part.
#[derive(Clone, Debug, Serialize)]
pub struct PartReport {
    /// Report of the rank's own files, with the manifest of its part.
    #[serde(flatten)]
    pub part: SaveReport,
    /// Rank.
    pub rank: u32,
    /// Number of ranks.
    pub ranks: u32,
    /// Attempt.
    pub attempt: String,
    /// True if every part is present: the step is saved under its name.
    pub complete: bool,
    /// Rank whose part is missing; there may be more.
    pub waits_for: Option<u32>,
    /// The manifest of the whole step, once it is complete.
    pub step: Option<String>,
}

/// Outcome of one try of a part.
enum TryOutcome {
    /// Value of the rank's part, and the value of the step or a rank whose part is missing.
    Done(Box<RefValue>, std::result::Result<Box<RefValue>, u32>),
    /// Concurrent changes require another try.
    Again,
}

impl Repository {
    /// Saves `source`, a folder or files in memory, as one rank's part of the step `name`. The step becomes visible when all
    /// ranks have saved their parts: the rank that completes it commits the union of all paths. An incomplete step never
    /// becomes visible. Any rank may call this again; it then uses its stored part.
    ///
    /// # Errors
    /// Usage, if the source is a file or the rank is out of range; conflict, if this rank saved other content in this attempt,
    /// if two ranks have different things under one path, if the name changed since the attempt began, or if the attempt was
    /// ended because none of its ranks made progress for long; else as [`Repository::save`].
    ///
    /// # Cancel safety
    /// Safe: the next call for this rank and attempt uses what was stored.
    #[tracing::instrument(skip_all, fields(%name, rank = part.rank))]
    pub async fn save_part(
        &self,
        source: impl Into<SaveSource>,
        name: &Name,
        part: &PartOptions,
        options: &SaveOptions,
    ) -> Result<PartReport> {
        Box::pin(self.save_part_from(source.into(), name, part, options)).await
    }

    async fn save_part_from(
        &self,
        source: SaveSource,
        name: &Name,
        part: &PartOptions,
        options: &SaveOptions,
    ) -> Result<PartReport> {
        let begun = Instant::now();
        let options = self.bind_first(name, &with_ranks(part, options)?).await?;
        let attempt = Attempt { name: name.clone(), id: part.attempt.clone(), ranks: part.ranks };
        let started = coarse_now();
        let (walk, formats) = unless_stopped(&options.stop, self.scan(source, &options)).await?;
        if walk.is_file() {
            let root = walk.root().unwrap_or(Path::new(""));
            return Err(Error::usage("a rank saves a folder").at(root.display()).got("a file"));
        }
        let state = self.state().await?;
        let before = state.refs.get(name).filter(|value| value.attempt.as_ref() != Some(&part.attempt));
        let labels = Labels::default();
        let query = ParentQuery { state: &state, name, options: &options, labels: &labels };
        let parent = self.parent(query).await?;
        let derive = AtomicBool::new(true);
        let saving =
            Saving { repository: self, name, options: &options, labels, walk, formats, parent, derive, started };
        let ranked = RankSave { saving, attempt, rank: part.rank };
        let (mut counts, mut stored_bytes) = (Counts::default(), 0);
        for _ in 0..ATTEMPTS {
            if let TryOutcome::Done(own, step) = ranked.attempt(&mut counts, &mut stored_bytes).await? {
                let seconds = begun.elapsed().as_secs_f64();
                // Files that an index names and that this rank lacks belong to other ranks.
                counts.lacking.clear();
                let complete = step.as_ref().ok();
                let replaced = complete.and_then(|step| before.filter(|before| before.version != step.version));
                let replaced = replaced.zip(complete).map(|(old, step)| Replaced::of(old, step));
                let own = ranked.saving.report(&own, counts, stored_bytes, seconds);
                return Ok(PartReport {
                    part: SaveReport { replaced, ..own },
                    rank: part.rank,
                    ranks: part.ranks.get(),
                    attempt: part.attempt.to_string(),
                    complete: step.is_ok(),
                    waits_for: step.as_ref().err().copied(),
                    step: step.ok().map(|value| value.manifest.to_string()),
                });
            }
        }
        Err(Error::busy("the attempt moves faster than this rank can follow").at(name).help("run the command again"))
    }
}

/// Adds the number of ranks to the facts in the options.
fn with_ranks(part: &PartOptions, options: &SaveOptions) -> Result<SaveOptions> {
    let ranks = part.ranks;
    if part.rank >= ranks.get() {
        return Err(Error::usage("there is no such rank")
            .expected(format!("below {ranks}"))
            .got(part.rank)
            .help("ranks count from 0, and the world size is the number of all that save a part"));
    }
    let world_size = options.facts.ranks().unwrap_or(ranks);
    if world_size != ranks && !part.attempt.says_parts(ranks) {
        return Err(Error::usage("the world size is the number of ranks that save").expected(ranks));
    }
    Ok(SaveOptions { facts: options.facts.clone().world_size(world_size), ..options.clone() })
}

/// State of one rank's save.
struct RankSave<'a> {
    saving: Saving<'a>,
    attempt: Attempt,
    rank: u32,
}

/// Stored tree of the rank.
struct OwnTree {
    manifest: Manifest,
    id: ManifestId,
}

impl RankSave<'_> {
    fn repository(&self) -> &Repository {
        self.saving.repository
    }

    /// Reads the state of the attempt and does the next step.
    async fn attempt(&self, counts: &mut Counts, stored_bytes: &mut u64) -> Result<TryOutcome> {
        if self.saving.options.expected == Expected::Nothing {
            let state = self.repository().state().await?;
            if state.attempt_state(&self.attempt) == AttemptState::Absent && state.refs.contains_key(&self.attempt.name)
            {
                return Err(exists(&self.attempt.name));
            }
        }
        let state = self.repository().join(&self.attempt).await?;
        let mut writer = match &state {
            AttemptState::Open(session, _) => {
                Writer::within(self.repository(), &self.saving.options.progress, *session)
            }
            _ => Writer::new(self.repository(), &self.saving.options.progress),
        };
        let outcome = match &state {
            AttemptState::Open(session, joint) => self.contribute((*session, joint), &mut writer, counts).await,
            AttemptState::Complete(value) => self.compare(value, &mut writer, counts).await,
            AttemptState::Absent => Ok(TryOutcome::Again),
        };
        *stored_bytes += writer.stored_bytes();
        let outcome = match outcome {
            Err(error) => {
                let what = format!("the save of {}", self.at());
                Err(end_stopped(&mut writer, &self.saving.options.stop, what, error).await)
            }
            Ok(done) => {
                if let Err(left) = writer.give_up().await {
                    tracing::debug!("uploads are left to the collector: {left:?}");
                }
                Ok(done)
            }
        };
        match outcome {
            // Objects of a closed session may be deleted.
            Err(error) if error.kind().is_conflict() || error.kind() == ErrorKind::NotFound => {
                self.outpaced(state, error).await
            }
            other => other,
        }
    }

    /// A refused commit may only mean that other ranks were faster.
    async fn outpaced(&self, before: AttemptState, error: Error) -> Result<TryOutcome> {
        let now = self.repository().state().await?.attempt_state(&self.attempt);
        match (before, now) {
            (AttemptState::Open(..), AttemptState::Complete(_)) => Ok(TryOutcome::Again),
            (AttemptState::Open(session, _), AttemptState::Open(now, _)) if session != now => Ok(TryOutcome::Again),
            (AttemptState::Open(..), AttemptState::Absent) => Err(self.ended().source(error)),
            _ => Err(error),
        }
    }

    /// Saves the rank's tree under the shared session, stores its part, and completes the step if this is the last part.
    async fn contribute(
        &self,
        (session, joint): (SessionId, &Joint),
        writer: &mut Writer,
        counts: &mut Counts,
    ) -> Result<TryOutcome> {
        let mut known = self.repository().stored_for(&self.saving.options.label_scope).await?;
        if self.saving.options.expected == Expected::Nothing && joint.expected.is_some() {
            return Err(exists(&self.attempt.name));
        }
        if known.state().version(&self.attempt.name) != joint.expected {
            return Err(self.moved());
        }
        let current = known.state().refs.get(&self.attempt.name).cloned();
        self.saving.add_base(&mut known, current.as_ref()).await?;
        let tree = self.saving.tree(&mut known, writer, counts).await?;
        let Some((manifest, ids, places, _memory)) = tree else { return Ok(TryOutcome::Again) };
        manifest.check_total()?;
        let (id, body) = manifest.encode();
        let own = OwnTree { manifest, id };
        let part = match self.repository().part(session, self.rank).await? {
            Some(there) => there,
            None => {
                let tree = PlacedTree { manifest: id, chunks: &ids, places: &places };
                let ((manifest_key, map_key), map) = writer.deposit(tree, &body, &known).await?;
                // A part cannot be withdrawn, so the packs that it relies on are checked before it is stored.
                let foreign = map.packs.iter().map(|pack| pack.id).filter(|pack| pack.session != session).collect();
                let now = self.repository().state().await?;
                if now.check_packs(&foreign, known.state().seq).is_err() {
                    return Ok(TryOutcome::Again);
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
                    behind: self.saving.behind(&places, &known),
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

    /// Checks that the stored part of this rank has the rank's current content.
    async fn check_same(&self, part: &RefValue, own: &OwnTree) -> Result<()> {
        if part.manifest == own.id {
            return Ok(());
        }
        let saved = self.repository().saved_as(&self.attempt.name, part).await?;
        let differs = lacking(&saved.manifest, &own.manifest).or_else(|| lacking(&own.manifest, &saved.manifest));
        match differs {
            Some((path, how)) => Err(self.other_content(&path, how)),
            None => Ok(()),
        }
    }

    /// Completes the step if every part is present.
    async fn finish(&self, session: SessionId, joint: &Joint, part: RankPart) -> Result<TryOutcome> {
        let parts = match self.repository().parts(session, self.rank, self.attempt.ranks.get()).await? {
            Parts::All(parts) => parts,
            Parts::Missing(rank) => {
                // Parts under a closed session do not count.
                return match self.repository().state().await?.attempt_state(&self.attempt) {
                    AttemptState::Open(now, _) if now == session => {
                        Ok(TryOutcome::Done(Box::new(part.value), Err(rank)))
                    }
                    AttemptState::Absent => Err(self.ended()),
                    _ => Ok(TryOutcome::Again),
                };
            }
        };
        self.saving.options.progress.phase("joining", 0);
        let trees = parts.iter().map(|part| self.repository().saved_as(&self.attempt.name, &part.value));
        let trees = stream::iter(trees.collect::<Vec<_>>()).buffered(READS).try_collect::<Vec<Saved>>().await?;
        let own: Vec<RankTree<'_>> = parts
            .iter()
            .zip(&trees)
            .map(|(part, tree)| RankTree { rank: part.rank, manifest: &tree.manifest })
            .collect();
        let whole = union(&own)?;
        whole.check_total()?;
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
            Completed::Done(step) => Ok(TryOutcome::Done(Box::new(part.value), Ok(step))),
            Completed::Over => Ok(TryOutcome::Again),
            Completed::Moved => Err(self.moved()),
            Completed::Lost(packs) => Err(self.lost(&packs)),
        }
    }

    /// Checks that the completed step has this rank's current content.
    async fn compare(&self, step: &RefValue, writer: &mut Writer, counts: &mut Counts) -> Result<TryOutcome> {
        let mut known = self.repository().stored_for(&self.saving.options.label_scope).await?;
        let saved = self.repository().saved_as(&self.attempt.name, step).await?;
        known.add(&saved);
        let tree = self.saving.tree(&mut known, writer, counts).await?;
        let Some((manifest, ids, _, _memory)) = tree else { return Ok(TryOutcome::Again) };
        if let Some((path, how)) = lacking(&saved.manifest, &manifest) {
            return Err(self.other_content(&path, how));
        }
        manifest.check_total()?;
        let (id, body) = manifest.encode();
        self.saving.remember(id, &body);
        let (logical_bytes, files) = (manifest.logical_bytes(), manifest.files().count() as u64);
        let own = RefValue { manifest: id, logical_bytes, files, chunks: ids.len() as u64, ..step.clone() };
        Ok(TryOutcome::Done(Box::new(own), Ok(Box::new(step.clone()))))
    }

    fn at(&self) -> String {
        format!("{} (rank {} of {}, attempt {})", self.attempt.name, self.rank, self.attempt.ranks, self.attempt.id)
    }

    fn other_content(&self, path: &str, how: &str) -> Error {
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
            .help("save again on all ranks: uploaded chunks are reused")
    }

    fn lost(&self, packs: &[PackId]) -> Error {
        Error::conflict("packs that this attempt relied on were damaged or collected")
            .at(self.at())
            .got(format!("{} packs", packs.len()))
            .help("save again on all ranks, with another `--attempt`")
    }
}
