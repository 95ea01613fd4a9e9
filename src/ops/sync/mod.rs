//! Sync: manifest -> chunks that the destination lacks -> read frames -> verify -> pack -> put -> commit.
//!
//! Frames are copied in their encoded form, but each is decoded and verified before it is written to a pack of the destination. Those
//! whose base the destination lacks are encoded anew, where that is less than with the base.
//! Names are published one by one, the oldest first, but each after those below it, so that an interrupted sync leaves a
//! prefix; normal deduplication finds chunks that were moved already.

mod existing;
mod failed;
mod quota;
mod removals;
mod shared;
mod view;

use std::collections::BTreeSet;
use std::sync::Arc;

use futures::{StreamExt as _, stream};
use serde::Serialize;
use tokio_util::sync::CancellationToken;

pub use self::existing::{Existing, KeptName, KeptReason};
use self::existing::{is_same, ordered};
pub use self::failed::FailedName;
use self::removals::left_behind;
use self::shared::{MovedTree, SharedTrees, TreeKeys};
use self::view::{Bases, View};
use super::stopping::{end_stopped, unless_stopped};
use crate::budget::GrowingMemory;
use crate::codec::Codec;
use crate::error::{Error, ErrorKind, Result};
use crate::limits::MIB;
use crate::name::Name;
use crate::policy::Labels;
use crate::progress::Progress;
use crate::repository::log::{KeptUse, RefValue, Refusal, State};
use crate::repository::{
    ChunkPlace, Gaps, Located, NameScope, PackRead, Publication, Published, Repository, Saved, StoredChunks, Writer,
    is_open, longest_read, plan, plan_anew, read_pack,
};

/// Maximum retries of one name because packs were deleted on either side.
const ATTEMPTS: usize = 5;
/// Maximum number of chunks remembered between names: about 128 MiB.
const KNOWN_MAX: usize = 1 << 19;
/// Bytes of memory of each.
const KNOWN_WEIGHT: u64 = 256;
/// Maximum number of failed names in an error.
const FAILED_SHOWN: usize = 5;

/// Options of a sync.
#[derive(Clone, Debug, Default)]
pub struct SyncOptions {
    /// Only report what would be moved: nothing is written.
    pub dry_run: bool,
    /// Copies every chunk as it is stored, with the bases that it needs, also from a directory, where the bases need not be read over a
    /// network to do without them. Where only the destination has labels or a policy, bases outside a tree stay behind all the same.
    pub as_stored: bool,
    /// Treatment of names that the destination has with another value.
    pub existing: Existing,
    /// Replaces names also where the destination forgets kept values for them.
    pub forget: bool,
    /// Progress counters.
    pub progress: Progress,
    /// Cancels the sync: stored data is recorded within seconds, and used by the next sync.
    pub stop: CancellationToken,
}

/// Result of a sync or dry run.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct SyncReport {
    /// True for a dry run: the numbers are those of a later sync.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// Names that are now equal in both repositories.
    pub names: u64,
    /// Stored bytes of the chunks that the destination lacked.
    pub moved_bytes: u64,
    /// Stored bytes of the chunks that it had, or that moved for an earlier name, counted for each name.
    pub skipped_bytes: u64,
    /// Distinct chunks of each name, summed.
    pub chunks: u64,
    /// Chunks that the destination lacked.
    pub new_chunks: u64,
    /// Names that had another tree in the destination, or in a dry run have. `undelete` restores that.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub replaced: Vec<Name>,
    /// Kept values of the destination that were forgotten for these, or in a dry run would be: only with [`SyncOptions::forget`].
    #[serde(skip_serializing_if = "super::restore::is_zero")]
    pub forgotten: u64,
    /// Names that the destination has with another value, which was kept.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<KeptName>,
    /// Names that the source has removed since, and the destination has. They stay there.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub left_behind: Vec<Name>,
    /// Names that the destination had removed, and that are there again, or in a dry run would be.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub returned: Vec<Name>,
    /// Names of several that could not be copied.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<FailedName>,
    /// In a dry run, each name that the destination lacks, or has with another value.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub planned: Vec<PlannedName>,
    /// Duration in seconds.
    pub seconds: f64,
}

/// A name that a sync would set.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlannedName {
    /// The name.
    pub name: Name,
    /// Bytes in all files.
    pub bytes: u64,
    /// Stored bytes of the chunks that would move for it, without those of earlier names.
    pub moved_bytes: u64,
    /// True if the destination has another tree under this name, or the same one with other facts.
    pub replaces: bool,
}

impl SyncReport {
    /// The report, unless names failed.
    ///
    /// # Errors
    /// The names that failed, with the first error and its kind.
    pub fn whole(self) -> Result<Self> {
        let Some(first) = self.failed.first() else { return Ok(self) };
        let shown = self.failed.iter().take(FAILED_SHOWN).map(|failed| failed.name.to_string());
        let mut names = shown.collect::<Vec<_>>().join(", ");
        if let Some(more @ 1..) = self.failed.len().checked_sub(FAILED_SHOWN) {
            names = format!("{names} and {more} more");
        }
        let what = if self.dry_run { "cannot be copied" } else { "could not be copied" };
        let error = Error::new(first.kind, format!("{names} {what}")).source(first.error.clone());
        Err(error
            .help("the report has the error of each; mend the cause, and run it again: only what is lacking is copied"))
    }
}

/// Copies the names and prefixes `what`, or all names, from `from` to the repository `to`; only chunks that `to` lacks move.
/// Names that exist in `to` with another value are replaced as `options.existing` says, if they have not changed since the start of
/// the sync. Of several names, one that cannot be copied does not stop the others: see [`SyncReport::failed`].
///
/// # Errors
/// Usage, if both are the same repository; not found, if nothing is under one of `what`; conflict, if a name of the
/// destination changed meanwhile, or labels of the source would bind others; exhausted, if it would forget a kept value for a
/// name that is replaced, unless it may; damaged, with pack and chunk, if the source is: no damaged byte is copied.
///
/// # Cancel safety
/// Safe: names are complete or unchanged, and the next sync uses uploaded data.
#[tracing::instrument(skip_all, fields(from = %from.id(), to = %to.id()))]
pub async fn sync(from: &Repository, to: &Repository, what: &[Name], options: &SyncOptions) -> Result<SyncReport> {
    let begun = std::time::Instant::now();
    if from.id() == to.id() && from.store().location() == to.store().location() {
        return Err(Error::usage("source and destination are the same repository").at(to.store()));
    }
    options.progress.phase("comparing", 0);
    let look = async {
        let source = from.state().await?;
        Ok((choose(&source, what)?, source, to.state().await?, StoredChunks::load(to).await?))
    };
    let (names, source, began, known) = unless_stopped(&options.stop, look).await?;
    let left_behind = left_behind(&source, &began, what);
    let sizes = names.iter().filter_map(|name| source.refs.get(name)).map(|value| value.logical_bytes);
    let total = sizes.fold(0, u64::saturating_add);
    options.progress.phase("syncing", total);
    let mut syncing = Syncing {
        from,
        to,
        what,
        options,
        kept: KeptUse::of(&began),
        began,
        known,
        known_bytes: 0,
        known_memory: to.budget().keep_growing(),
        separates: false,
        leaves_bases: false,
        writer: Writer::new(to, &options.progress),
        shared: SharedTrees::default(),
        set: BTreeSet::new(),
        report: SyncReport { dry_run: options.dry_run, left_behind, ..SyncReport::default() },
        reported: 0,
    };
    for name in &names {
        let chunks = syncing.report.new_chunks;
        let Err(error) = syncing.name(name).await else { continue };
        if names.len() == 1 || !syncing.goes_on_after(&error, chunks).await {
            return Err(end_stopped(&mut syncing.writer, &options.stop, format!("the sync of {name}"), error).await);
        }
        syncing.note_failed(name, &error);
    }
    syncing.note_forgotten();
    syncing.end().await;
    Ok(SyncReport { seconds: begun.elapsed().as_secs_f64(), ..syncing.report })
}

/// Checks that some name of `what` may be copied from `from` to a new repository at `location`, before that is made.
///
/// # Errors
/// Not found, if nothing is under one of `what`; denied, with the rule, or conflict, for labels under which nobody could read a
/// name there, if every name is refused.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn check_new_destination(from: &Repository, what: &[Name], addresses: &[String]) -> Result<()> {
    let state = from.state().await?;
    let names = choose(&state, what)?;
    let trees = names.iter().filter_map(|name| state.refs.get_key_value(name));
    let denied = from.denied_here(&state, trees).await?;
    let refused = from.refused_anew(&state, &names, addresses).await?;
    let all: BTreeSet<&Name> = denied.iter().map(|one| one.name).chain(refused.iter().map(|(name, _)| *name)).collect();
    if all.len() < names.len() {
        return Ok(());
    }
    let mut refusals = denied.into_iter().map(|one| one.refusal).chain(refused.into_iter().map(|(_, refusal)| refusal));
    refusals.next().map_or(Ok(()), Err)
}

/// The names to sync, in the order in which they are published.
fn choose(state: &State, what: &[Name]) -> Result<Vec<Name>> {
    let missing = what.iter().find(|&selector| !state.refs.keys().any(|name| name.is_under(selector)));
    if let Some(selector) = missing {
        return Err(Error::not_found("the source has no such name or prefix")
            .at(selector)
            .help("`towline ls --repo` with the source's URL lists the names"));
    }
    let chosen = state.refs.iter().filter(|(name, _)| what.is_empty() || what.iter().any(|s| name.is_under(s)));
    Ok(ordered(&chosen.map(|(name, value)| (value.version, name)).collect::<Vec<_>>()))
}

/// One sync in progress.
struct Syncing<'a> {
    from: &'a Repository,
    to: &'a Repository,
    what: &'a [Name],
    options: &'a SyncOptions,
    /// State of the destination at the start of the sync.
    began: Arc<State>,
    /// Use of its quota of kept values, with those that this sync has replaced.
    kept: KeptUse,
    known: StoredChunks,
    /// Memory of them that is counted, in bytes.
    known_bytes: u64,
    known_memory: GrowingMemory,
    /// True if a name must not rely on what is stored as a difference for another one.
    separates: bool,
    /// True if a name must not bring bases outside its tree: the source did not know of the labels or the policy of the destination.
    leaves_bases: bool,
    writer: Writer,
    shared: SharedTrees,
    /// Names that the destination has from the source by now.
    set: BTreeSet<Name>,
    report: SyncReport,
    /// Plain bytes of the current name that are counted in the progress.
    reported: u64,
}

/// Outcome of one try to sync a name.
enum Step {
    /// The destination has it.
    Done,
    /// Packs of the destination that it relied on were deleted.
    Lost,
    /// An object of the source was deleted.
    Gone(Error),
}

/// Labels that come with a name, and the names below it that have come from the source, too.
struct Coming {
    labels: Labels,
    come: BTreeSet<Name>,
}

impl Syncing<'_> {
    async fn name(&mut self, name: &Name) -> Result<()> {
        // A dry run records there which chunks would have moved.
        if self.options.dry_run {
            self.count_known()?;
        } else if self.known.near() > KNOWN_MAX {
            self.forget().await?;
        }
        let mut failed: Option<RefValue> = None;
        for attempt in 0..ATTEMPTS {
            let state = self.from.state().await?;
            let Some(value) = state.refs.get(name).cloned() else { return self.vanished(name) };
            if self.is_kept(name, &value, &state) {
                return Ok(());
            }
            let come = self.come_below(name);
            let labels = self.to.coming_labels((self.from, &state), name, &come).await?;
            if attempt == 0 || !self.separates {
                self.separate(&state);
            }
            match self.attempt(name, &value, &Coming { labels, come }).await? {
                Step::Done => {
                    self.note_returned(name, &value);
                    self.set.insert(name.clone());
                    return Ok(());
                }
                Step::Lost => self.forget().await?,
                // Collected or repacked between two readings: the name tells where its content is now.
                Step::Gone(_) if failed.as_ref() != Some(&value) => failed = Some(value),
                Step::Gone(error) => {
                    let missing = Error::damaged("an object of the source is missing")
                        .at(error.place().unwrap_or(name.as_str()))
                        .help("`towline verify --repair` on the source tells what it hits")
                        .source(error);
                    return Err(self.shared.fail(name, &value, missing));
                }
            }
        }
        Err(Error::busy("packs are collected faster than they can be synced").at(name).help("try again"))
    }

    /// Counts the memory of the chunks that are known.
    fn count_known(&mut self) -> Result<()> {
        let wanted = self.known.near() as u64 * KNOWN_WEIGHT;
        let more = wanted.saturating_sub(self.known_bytes);
        if !self.known_memory.try_add(more) {
            return Err(Error::exhausted("the names have more chunks than the memory budget holds in a dry run")
                .expected(format!("at most {} MiB for what is known of them", self.known_memory.max() / MIB))
                .got(format!("{} chunks so far", self.known.near()))
                .help("raise --memory, or name some of the names"));
        }
        self.known_bytes += more;
        Ok(())
    }

    /// Forgets which chunks of the destination are known, and reads its state anew.
    async fn forget(&mut self) -> Result<()> {
        self.shared.there.clear();
        self.known = StoredChunks::load(self.to).await?;
        if self.separates {
            self.known.forget_differences();
        }
        Ok(())
    }

    /// Forgets the differences of other names, if labels or a policy restrict a side: a base may be a stricter name's. `source` is the
    /// state of the source; that of the destination was just read.
    fn separate(&mut self, source: &State) {
        let there = self.to.log().last_seen();
        let restricts_there = there.is_some_and(|there| !is_open(&there));
        self.separates |= !is_open(source) || restricts_there;
        self.leaves_bases |= is_open(source) && restricts_there;
        if self.separates {
            self.known.forget_differences();
        }
    }

    /// Handles a removed name: an error if it was requested itself, not if it only matched a prefix.
    fn vanished(&self, name: &Name) -> Result<()> {
        if self.what.contains(name) {
            return Err(Error::not_found("name was removed from the source during this sync").at(name));
        }
        tracing::info!("{name} was removed from the source during this sync");
        Ok(())
    }

    async fn attempt(&mut self, name: &Name, value: &RefValue, coming: &Coming) -> Result<Step> {
        if let Some(stored) = self.existing_copy(name, value).await? {
            self.label(name, coming).await?;
            self.report.skipped_bytes += stored;
            return Ok(self.done(value));
        }
        self.check_quota(name, value)?;
        if let Some(done) = self.further(name, value, coming).await? {
            return Ok(done);
        }
        if let Some(error) = self.shared.failed_before(name, value) {
            return Err(error);
        }
        let (saved, body) = match self.from.saved_verbatim(name, value).await {
            Ok((saved, body)) => (saved.shared(), body),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Step::Gone(error)),
            Err(error) => return Err(self.shared.fail(name, value, error)),
        };
        let moved = MovedTree::of(&saved);
        moved.check(name, value)?;
        let stop = self.options.stop.clone();
        let skipped = match unless_stopped(&stop, self.fetch(&saved)).await {
            Ok(Ok(skipped)) => skipped,
            Ok(Err(gone)) => return Ok(Step::Gone(gone)),
            Err(error) => return Err(self.shared.fail(name, value, error)),
        };
        if self.options.dry_run {
            self.shared.moved.insert(TreeKeys::of(value), moved);
            self.report.skipped_bytes += skipped;
            return Ok(self.done(value));
        }
        let ids = &saved.manifest.chunks.ids;
        let places: Option<Vec<_>> = self.known.locate(ids).await?.into_iter().collect();
        let places = places.ok_or_else(|| Error::other("a chunk that was stored is not known").at(name))?;
        let publication = Publication {
            name,
            expected: self.began.version(name),
            keep: self.keeping(),
            manifest: (value.manifest, body.to_vec()),
            chunks: ids,
            places: &places,
            known: &self.known,
            logical_bytes: value.logical_bytes,
            files: value.files,
            saved: value.saved,
            behind: value.behind,
            facts: value.facts.clone(),
            labels: Labels::default(),
            label_scope: NameScope::default(),
            from: Vec::new(),
        };
        self.label(name, coming).await?;
        match self.writer.publish(publication).await? {
            Published::Done(_) => {
                self.shared.moved.insert(TreeKeys::of(value), moved);
                self.report.skipped_bytes += skipped;
                self.note_replaced(name, value);
                Ok(self.done(value))
            }
            Published::Lost(_) => Ok(Step::Lost),
            Published::Moved => Err(Refusal::RefMoved(name.clone()).into()),
        }
    }

    /// Gives `name` the labels that come with it: not before its tree is there, as one that cannot be copied makes nothing stricter.
    async fn label(&self, name: &Name, Coming { labels, come }: &Coming) -> Result<()> {
        if self.options.dry_run { Ok(()) } else { self.to.take_labels(name, labels, come).await }
    }

    /// Copies the missing chunks of a tree, or only counts them. Returns the stored bytes that exist already, or the error if an
    /// object of the source was deleted.
    async fn fetch(&mut self, saved: &Arc<Saved>) -> Result<Result<u64>> {
        let found = self.known.locate(&saved.manifest.chunks.ids).await?;
        let bases = if self.leaves_bases {
            Bases::Own
        } else if self.options.as_stored || self.from.store().directory().is_none() {
            // Bases that are read from afar may as well be kept.
            Bases::Kept
        } else {
            Bases::Fewest
        };
        let mut view = Arc::new(View::new(saved, &found, &mut self.known, bases).await?);
        if self.options.dry_run {
            self.count(saved, &view)?;
        } else {
            if let Some(gone) = self.pull(&view).await? {
                return Ok(Err(gone));
            }
            if view.is_longer() {
                tracing::debug!("{} is copied as it is stored: its map foretold too little", saved.name);
                let found = self.known.locate(&saved.manifest.chunks.ids).await?;
                view = Arc::new(View::new(saved, &found, &mut self.known, Bases::Kept).await?);
                if let Some(gone) = self.pull(&view).await? {
                    return Ok(Err(gone));
                }
            }
            self.writer.settle().await?;
        }
        let skipped = saved.map.frames.iter().zip(&found).filter(|(_, place)| place.is_some());
        Ok(Ok(skipped.map(|(frame, _)| u64::from(frame.stored_len)).sum()))
    }

    /// Counts the chunks of a tree that would move, which then count as present.
    fn count(&mut self, saved: &Saved, view: &View) -> Result<()> {
        let before = self.report.moved_bytes;
        for &chunk in view.lacking.iter().chain(&view.alone) {
            let Located { id, mut place, .. } = saved.locate(chunk)?;
            if view.alone.contains(&chunk) {
                place =
                    ChunkPlace { stored_len: saved.alone_len(chunk)?.bytes, codec: Codec::Planes, base: None, ..place };
            }
            self.known.stored(id, place);
            self.report.new_chunks += 1;
            self.report.moved_bytes += u64::from(place.stored_len);
        }
        self.plan(&saved.name, &saved.value, self.report.moved_bytes - before);
        Ok(())
    }

    /// Reports that `name` would be set to `value`.
    fn plan(&mut self, name: &Name, value: &RefValue, moved_bytes: u64) {
        self.report.planned.push(PlannedName {
            name: name.clone(),
            bytes: value.logical_bytes,
            moved_bytes,
            replaces: self.began.refs.get(name).is_some_and(|there| !is_same(there, value)),
        });
        self.note_replaced(name, value);
    }

    fn done(&mut self, value: &RefValue) -> Step {
        self.report.names += 1;
        self.report.chunks = self.report.chunks.saturating_add(value.chunks);
        self.options.progress.advance(value.logical_bytes.saturating_sub(std::mem::take(&mut self.reported)));
        Step::Done
    }

    /// Adds the chunks of the destination's value of `name`. Returns its stored bytes, if tree and facts are equal and all chunks
    /// are in live packs.
    async fn existing_copy(&mut self, name: &Name, value: &RefValue) -> Result<Option<u64>> {
        let Some(there) = self.began.refs.get(name) else { return Ok(None) };
        let before = self.shared.there.get(&TreeKeys::of(there)).copied();
        // The differences of another name are not known any more.
        let before = before.filter(|_| !self.separates || is_same(there, value));
        let stored = match before {
            Some(stored) => {
                self.to.check_readable(name, &there.manifest).await?;
                stored
            }
            None => {
                let saved = match self.to.saved_as(name, there).await {
                    Ok(saved) => saved,
                    Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Damaged) => {
                        tracing::warn!("what the destination has under {name} cannot be used: {error:?}");
                        return Ok(None);
                    }
                    Err(error) => return Err(error),
                };
                self.known.add(&saved);
                let live = saved.map.packs.iter().all(|pack| self.known.state().is_target(&pack.id));
                let stored = live.then(|| stored_bytes(&saved));
                self.shared.there.insert(TreeKeys::of(there), stored);
                stored
            }
        };
        Ok(stored.filter(|_| is_same(there, value)))
    }

    /// Copies the chunks of `view`, until one is longer than foreseen; returns the error if one of their packs was deleted.
    async fn pull(&mut self, view: &Arc<View>) -> Result<Option<Error>> {
        let longest = longest_read(self.from, self.to.budget());
        let mut reads = plan(|chunk| view.locate(chunk), view.lacking.iter().copied(), longest, Gaps::Wide)?;
        reads.extend(plan_anew(|chunk| view.locate(chunk), view.alone.iter().copied(), longest, Gaps::Wide)?);
        let (repositories, budget) = ([self.from, self.to], self.to.budget());
        let stored = stream::iter(reads).map(|read| {
            let view = Arc::clone(view);
            async move {
                let memory = if view.is_anew(&read) {
                    Some(read.memory_to_encode(budget, |chunk| view.locate(chunk)).await?)
                } else {
                    None
                };
                let take = move |read: &PackRead, buffer| view.take(read, buffer);
                Ok::<_, Error>((read_pack(&repositories, budget, read, take).await?, memory))
            }
        });
        // In order, so that chunks that were packed together stay together.
        let mut stored = std::pin::pin!(stored.buffered(self.from.parallelism()));
        while let Some(read) = stored.next().await {
            let (stored, _memory) = match read {
                Ok(taken) => taken,
                Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Some(error)),
                Err(error) => return Err(error),
            };
            if view.is_longer() {
                break;
            }
            let share = stored.is_mostly_used();
            for (id, at, frame) in stored.frames() {
                let (alone_len, len) = (if frame.base.is_some() { at.alone_len } else { 0 }, frame.bytes.len() as u64);
                let place = self.writer.push(id, frame, at.plain_len, share).await?;
                self.known.stored(id, ChunkPlace { alone_len, ..place });
                self.options.progress.advance(at.plain_len.into());
                self.reported += u64::from(at.plain_len);
                self.report.new_chunks += 1;
                self.report.moved_bytes += len;
            }
        }
        Ok(None)
    }
}

/// Stored bytes of the tree's own chunks: the bases that its map also has may be those of other names.
fn stored_bytes(saved: &Saved) -> u64 {
    let own = saved.map.frames.iter().take(saved.manifest.chunks.ids.len());
    own.map(|frame| u64::from(frame.stored_len)).sum()
}
