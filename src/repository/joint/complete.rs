//! The one commit that makes a step visible.

use std::collections::{BTreeSet, HashMap};

use crate::error::{Error, Result};
use crate::format::PackRef;
use crate::id::{ChunkId, PackId, SessionId};
use crate::repository::log::{Action, Joint, RefValue, State, log_forgotten};
use crate::repository::mapping::{PlacedTree, map_of};
use crate::repository::writer::put_tree;
use crate::repository::{ChunkPlace, Repository, Saved};

/// The tree of a whole step.
#[derive(Clone, Debug)]
pub struct JointTree<'a> {
    /// The body of its manifest.
    pub body: &'a [u8],
    /// The manifest's chunks.
    pub chunks: &'a [ChunkId],
    /// Trees of all ranks, with the places of the chunks.
    pub parts: &'a [Saved],
    /// Entry of the oldest state in which a part found packs of other sessions.
    pub known: u64,
    /// Value to set, without the keys of manifest and map.
    pub value: RefValue,
}

/// Outcome.
#[derive(Debug)]
pub enum Completed {
    /// This commit has set the name.
    Done(Box<RefValue>),
    /// The session had ended: another rank has completed the step, or the session was fenced.
    Over,
    /// The name has changed since the session opened.
    Moved,
    /// These packs were purged, or are damaged.
    Lost(Vec<PackId>),
}

impl Repository {
    /// Makes the tree of a complete step visible and ends its session, unless another rank did.
    ///
    /// # Errors
    /// As a commit.
    ///
    /// # Cancel safety
    /// Not safe: the commit may have happened; read the name to find out.
    pub async fn complete(&self, session: SessionId, joint: &Joint, tree: JointTree<'_>) -> Result<Completed> {
        let Places { places, packs } = Places::of(tree.parts)?;
        let found: Option<Vec<ChunkPlace>> = tree.chunks.iter().map(|id| places.get(id).copied()).collect();
        let found = found.ok_or_else(|| Error::other("a chunk of a step is in none of its parts"))?;
        let base = |place: &ChunkPlace| {
            let base = place.base?;
            places.get(&base).filter(|found| place.codec.may_have_base(found.codec)).map(|found| (base, *found))
        };
        let placed = PlacedTree { manifest: tree.value.manifest, chunks: tree.chunks, places: &found };
        let map = map_of(placed, |id| packs.get(&id).copied(), base)?;
        let (manifest_key, map_key) = put_tree(self, session, tree.body, &map).await?;
        let value = RefValue { manifest_key, map_key, ..tree.value };
        let relied: BTreeSet<PackId> = map.packs.iter().map(|pack| pack.id).collect();
        let (mut outcome, mut forgotten) = (Completed::Over, Vec::new());
        let commit = self.log().commit(Some(session), |state| {
            let (decided, actions) = decide(state, session, joint, (&relied, tree.known), &value);
            forgotten.clone_from(&actions);
            outcome = decided;
            Ok(actions)
        });
        let committed = commit.await?;
        let Some(version) = committed.entry else { return Ok(outcome) };
        log_forgotten(&forgotten);
        crate::repository::index::merge_if_many(self, &committed.state).await;
        Ok(Completed::Done(Box::new(RefValue { version, ..value })))
    }
}

/// Actions to commit on `state`; none, if the step must not be completed.
fn decide(
    state: &State,
    session: SessionId,
    joint: &Joint,
    (relied, known): (&BTreeSet<PackId>, u64),
    value: &RefValue,
) -> (Completed, Vec<Action>) {
    if !state.sessions.contains_key(&session) {
        return (Completed::Over, Vec::new());
    }
    let name = &joint.attempt.name;
    if state.version(name) != joint.expected {
        return (Completed::Moved, Vec::new());
    }
    // Damaged packs are condemned in open sessions, too; the log then refuses to make them reachable.
    let own = state.condemned.keys().chain(state.purged.keys()).filter(|pack| pack.session == session);
    let damaged: Vec<PackId> = own.copied().collect();
    if !damaged.is_empty() {
        return (Completed::Lost(damaged), Vec::new());
    }
    match state.check_packs(relied, known) {
        Err(lost) => (Completed::Lost(lost), Vec::new()),
        Ok(mut actions) => {
            actions.extend(state.keep_replaced(name, value.manifest));
            actions.push(Action::SetRef { name: name.clone(), expected: joint.expected, value: value.clone() });
            actions.push(Action::Close(session));
            (Completed::Over, actions)
        }
    }
}

/// Places of the chunks of several trees.
struct Places {
    places: HashMap<ChunkId, ChunkPlace>,
    packs: HashMap<PackId, PackRef>,
}

impl Places {
    /// Chooses for each chunk that several ranks have stored the place with the fewest hops. So each chunk's base has no more
    /// hops than in the part that the chunk is from.
    fn of(parts: &[Saved]) -> Result<Self> {
        let mut found = Self { places: HashMap::new(), packs: HashMap::new() };
        for part in parts {
            found.packs.extend(part.map.packs.iter().map(|pack| (pack.id, *pack)));
            for chunk in 0..part.located_chunks() {
                let located = part.locate(chunk)?;
                let place = found.places.entry(located.id).or_insert(located.place);
                if located.place.codec.hops() < place.codec.hops() {
                    *place = located.place;
                }
            }
        }
        Ok(found)
    }
}
