//! The world of an exploration: what the store holds, what truly happened, and where each actor stands; and one move of
//! it, which is one request to the store.

use std::collections::BTreeMap;

use towline::clock::Timestamp;
use towline::repository::layout::Family;
use towline::repository::log::{Action, LogEntry, RefValue, SegmentInfo};

use super::actor::{Actor, Step, Stop};
use super::book::{Book, JOINT, Set, attempt, name, session, write_id};

/// One rule of the protocol that the driver leaves out, to see that the exploration notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mutation {
    /// A create that the store acknowledges is a commit; nobody looks at the boundary.
    NoBoundaryAfterCreate,
    /// A create that the store refuses as existing is somebody else's.
    BelieveExists,
    /// A fold ends without looking at the boundary again.
    NoBoundaryAfterFold,
    /// An entry that does not follow is damage, whatever the boundary says.
    DamageBeforeBoundary,
    /// A ref that has the expected version was set by this writer.
    FateByVersion,
    /// The log is cut before its boundary moves.
    CutFirst,
    /// Any condemnation of a pack will do for its purge.
    PurgeAnyAt,
    /// Condemned packs are purged without marking again.
    NoRemark,
    /// Purges are forgotten once they are deleted, without a trace.
    ForgetEarly,
    /// A commit does not care that a pack was purged.
    NoVouch,
    /// A commit does not care how old its knowledge is.
    AgelessKnowledge,
    /// A commit relies on condemned packs and pardons none.
    NoPardon,
    /// A save does not name its session.
    SaveUnbound,
    /// A copy takes its source from an older state than the one that it follows.
    CopyBlindly,
    /// A session is fenced though it moved since it was judged.
    FenceAnyTouched,
    /// A session's segment counts as built when it is added, not when its session opened.
    AddBuiltNow,
    /// Segments are rebuilt as if on the newest state.
    ReplaceBuiltNow,
    /// A value is restored as it was when somebody looked, kept or not.
    UndeleteBlindly,
    /// A marking looks at names alone.
    MarkNamesAlone,
}

/// Contents of the store, the true history, and the state of every actor.
#[derive(Clone, Debug, Hash)]
pub(crate) struct World {
    /// Packs, maps and segments.
    pub(crate) objects: Set,
    /// Entries by number, less one; 0 where there is none.
    pub(crate) log: Vec<u32>,
    /// Numbers of snapshots; what is in them follows from the history.
    pub(crate) snapshots: u32,
    /// Floors of the boundary objects, from number 1.
    pub(crate) boundaries: Vec<u8>,
    /// True history of commits.
    pub(crate) history: u32,
    /// Creates that the store has yet to carry out.
    pub(crate) late: Vec<(u8, u32)>,
    /// Parts that ranks have created, in order.
    pub(crate) parts: Vec<Part>,
    /// Faults that may still happen.
    pub(crate) faults: u8,
    pub(crate) actors: Vec<Actor>,
}

/// A rank's part: the packs that its map names, and the state that it knows them from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Part {
    pub(crate) session: u8,
    pub(crate) rank: u8,
    pub(crate) packs: Set,
    pub(crate) known: u32,
}

/// Fate of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    None,
    /// It takes effect; the answer is lost.
    Lost,
    /// It does not take effect; the answer does not say so.
    Failed,
    /// It takes effect later; the answer is lost.
    Late,
}

/// One step of the world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Move {
    /// An actor's next request; `pick` is which one, where it has a choice.
    Act { who: u8, pick: u8, fault: Fault },
    /// A late create arrives.
    Arrive(u8),
}

/// The rules of one exploration.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) book: Book,
    pub(crate) scripts: Vec<Vec<Step>>,
    /// Somebody lists the objects of sessions.
    pub(crate) sweeps: bool,
    pub(crate) mutation: Option<Mutation>,
    /// Events, and in how many moves: an exploration that met no hazard proves nothing.
    pub(crate) met: BTreeMap<&'static str, u64>,
}

impl Model {
    pub(crate) fn new(scripts: Vec<Vec<Step>>, mutation: Option<Mutation>) -> Self {
        let sweeps = scripts.iter().flatten().any(|step| matches!(step, Step::List));
        let mut book = Book::new();
        book.mutation = mutation;
        Self { book, scripts, sweeps, mutation, met: BTreeMap::new() }
    }

    pub(crate) fn broken(&self, rule: Mutation) -> bool {
        self.mutation == Some(rule)
    }

    pub(crate) fn meet(&mut self, what: &'static str) {
        *self.met.entry(what).or_default() += 1;
    }

    /// A store with an empty log, and the actors before their first steps.
    pub(crate) fn start(&self, faults: u8) -> World {
        World {
            objects: 0,
            log: vec![],
            snapshots: 0,
            boundaries: vec![],
            history: 0,
            late: vec![],
            parts: vec![],
            faults,
            actors: self.scripts.iter().map(|_| Actor::default()).collect(),
        }
    }

    /// Past: session `by` (90 and above) saved `packs` new packs under `text`.
    pub(crate) fn past_save(&mut self, world: &mut World, by: u8, text: &str, packs: u8) {
        let packs = (0..packs).fold(0, |set: Set, n| set | 1 << self.book.object(Family::Pack, by, 1 << n));
        let segment = self.book.object(Family::Index, by, packs);
        let map = self.book.object(Family::Map, by, packs);
        world.objects |= packs | 1 << segment | 1 << map;
        let segment = Action::AddSegment(self.book.id(segment), info(packs));
        self.past(world, Some(by), vec![Action::Open(session(by)), segment]);
        let set = Action::SetRef { name: name(text), expected: None, value: self.book.value(map) };
        self.past(world, Some(by), vec![set, Action::Close(session(by))]);
    }

    /// Past: `text` was removed again.
    pub(crate) fn past_remove(&mut self, world: &mut World, text: &str) {
        let expected = self.book.state(self.book.history(world.history).state).version(&name(text)).unwrap();
        self.past(world, None, vec![Action::RemoveRef { name: name(text), expected }]);
    }

    /// Past: `from` got the second name `to`, was removed, and what it stood for is kept.
    pub(crate) fn past_copy_and_keep(&mut self, world: &mut World, from: &str, to: &str) {
        let value = self.book.state(self.book.history(world.history).state).refs[&name(from)].clone();
        let version = value.version;
        let set = Action::SetRef { name: name(to), expected: None, value: RefValue { version: 0, ..value } };
        self.past(world, None, vec![set]);
        let gone = Action::RemoveRef { name: name(from), expected: version };
        self.past(world, None, vec![Action::Keep { name: name(from), version }, gone]);
    }

    fn past(&mut self, world: &mut World, by: Option<u8>, actions: Vec<Action>) {
        let write = write_id(255, u8::try_from(world.log.len()).unwrap());
        let entry = self.book.file_entry(LogEntry { write, session: by.map(session), at: Timestamp(0), actions });
        let number = u8::try_from(world.log.len() + 1).unwrap();
        assert!(self.create(world, number, entry).unwrap());
    }

    /// Past: actor `who` has opened its session.
    pub(crate) fn past_open(&mut self, world: &mut World, who: u8) {
        self.past(world, Some(who), vec![Action::Open(session(who))]);
    }

    /// Past: one of the garbage packs was condemned and purged; nobody has deleted it yet.
    pub(crate) fn past_purge(&mut self, world: &mut World) {
        let known = self.book.known(self.book.history(world.history).state);
        let pack = self.book.ids(known.listed & !known.marked).pop_first().unwrap();
        self.past(world, None, vec![Action::Condemn { pack, len: 1, damaged: false }]);
        let at = u64::try_from(world.log.len()).unwrap();
        self.past(world, None, vec![Action::Purge { pack, at }]);
    }

    /// Past: the ranks' session is open; actor `who` opened it.
    pub(crate) fn past_join(&mut self, world: &mut World, who: u8) {
        self.past(world, Some(JOINT + who), vec![Action::OpenJoint(session(JOINT + who), attempt())]);
    }

    /// Actors have looked at the log before.
    pub(crate) fn warm(&self, world: &mut World) {
        let state = self.book.history(world.history).state;
        world.actors.iter_mut().for_each(|actor| (actor.seen, actor.known) = (state, state));
    }

    /// The past was truncated away.
    pub(crate) fn past_truncate(world: &mut World) {
        let floor = u8::try_from(world.log.len()).unwrap();
        world.log.fill(0);
        world.snapshots |= 1 << floor;
        world.boundaries.push(floor);
    }

    /// Everything that may happen next.
    pub(crate) fn moves(&self, world: &World) -> Vec<Move> {
        let mut moves: Vec<Move> = (0..world.late.len()).map(|i| Move::Arrive(u8::try_from(i).unwrap())).collect();
        for (who, actor) in (0..).zip(&world.actors) {
            for pick in 0..self.picks(actor, who) {
                moves.push(Move::Act { who, pick, fault: Fault::None });
            }
            if world.faults > 0 && actor.creates() {
                let faults = [Fault::Lost, Fault::Failed, Fault::Late];
                moves.extend(faults.map(|fault| Move::Act { who, pick: 0, fault }));
            }
        }
        moves
    }

    /// The world after `step`.
    ///
    /// # Errors
    /// The rule that was violated.
    pub(crate) fn go(&mut self, world: &World, step: Move) -> Result<World, String> {
        let mut next = world.clone();
        match step {
            Move::Arrive(which) => {
                let (number, entry) = next.late.remove(usize::from(which));
                if self.create(&mut next, number, entry)? {
                    self.meet("late create took effect");
                }
            }
            Move::Act { who, pick, fault } => {
                next.faults -= u8::from(fault != Fault::None);
                let mut actor = next.actors[usize::from(who)].clone();
                match self.act(&mut next, &mut actor, who, pick, fault) {
                    Ok(()) => {}
                    Err(Stop::Wrong(rule)) => return Err(rule),
                    Err(Stop::GivesUp) => actor.stop(),
                }
                next.actors[usize::from(who)] = actor;
            }
        }
        self.hold(&next)?;
        Ok(next)
    }

    /// The store's create-if-absent of a log entry. Truth grows only at its end: elsewhere it is a stray.
    pub(crate) fn create(&mut self, world: &mut World, number: u8, entry: u32) -> Result<bool, String> {
        let at = usize::from(number) - 1;
        if world.log.get(at).is_some_and(|&found| found != 0) {
            return Ok(false);
        }
        world.log.resize(world.log.len().max(at + 1), 0);
        world.log[at] = entry;
        let len = self.book.history(world.history).len;
        if number > len + 1 {
            return Err(format!("entry {number} leaves a hole in a log of {len}"));
        }
        if number <= len {
            self.meet("stray entry under a name that was cut away");
            return Ok(true);
        }
        world.history = self.book.append(world.history, entry)?;
        Ok(true)
    }

    /// Checks the invariants of every world.
    fn hold(&self, world: &World) -> Result<(), String> {
        let history = self.book.history(world.history);
        let lacks = self.book.known(history.state).needs & !world.objects;
        if lacks != 0 {
            return Err(format!("a ref or a live segment needs what is gone: {:?}", self.book.ids(lacks)));
        }
        for (actor, writes) in world.actors.iter().zip(history.writes) {
            if actor.committed & !writes != 0 {
                return Err("a writer believes in a commit that is none".to_owned());
            }
            if actor.failed & writes != 0 {
                return Err("a writer believes that a commit failed".to_owned());
            }
        }
        Ok(())
    }
}

/// Facts of a segment in the log; writers leave `built` to the fold.
pub(crate) fn info(packs: Set) -> SegmentInfo {
    SegmentInfo { len: 1, packs: packs.count_ones().into(), chunks: packs.count_ones().into(), built: 0 }
}
