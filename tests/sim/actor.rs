//! An actor: a script of steps, each some requests to the store, with fold.rs, commit.rs and truncate.rs of the log
//! mirrored request by request. Local work happens at the end of the request before it.
//!
//! A crash is a move that never comes: every world is checked, also those in which somebody stands still for ever.

use towline::repository::layout::Family;

use super::book::{Set, members, owner, write_id};
use super::decide::shows;
use super::model::{Fault, Model, Move, Mutation, World};

/// What an actor's script is made of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Refresh, and remember what is known from now on.
    Look,
    /// List all objects of sessions.
    List,
    /// Upload a pack of its own.
    PutPack,
    /// Upload the segment that lists it.
    PutSegment,
    /// Upload a map of its own pack and of all that is known and a dedup target.
    PutMap,
    /// Upload a map of its own pack alone: what it lists was moved there.
    PutMoved,
    /// Upload the known segments that list purged packs as one that does not.
    PutMerged,
    /// Commit something.
    Commit(Act),
    /// Delete the objects of purged packs.
    DeletePurged,
    /// Delete listed objects that nothing known keeps.
    Sweep,
    /// Truncation: read the boundary; nothing to do unless the log is longer.
    Bound,
    /// Truncation: upload the snapshot of what is known.
    Snapshot,
    /// Truncation: list the snapshots, choose the floor.
    Choose,
    /// Truncation: create the next boundary.
    Raise,
    /// Truncation: read the boundary, list what is below it.
    ListCut,
    /// Truncation: delete that, in any order.
    Cut,
}

/// What an actor commits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Open,
    AddSegment,
    Save(&'static str),
    Copy(&'static str, &'static str),
    Remove(&'static str),
    /// Condemn what no ref needs.
    Condemn,
    /// Condemn session n's first own pack as damaged.
    CondemnDamaged(u8),
    /// Pardon or purge what is condemned.
    Judge,
    Deleted,
    Replace,
    /// What a name needs has moved to an own pack: swap its map, condemn what it needed.
    Repack(&'static str),
    Fence(u8),
    Renew,
    Close,
}

/// Where an actor stands.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Actor {
    /// Its step; `STOPPED` once it gave up.
    pub(crate) at: u8,
    proc: Proc,
    /// What its process has learnt: the log's `Seen`.
    pub(crate) boundary: u8,
    pub(crate) seen: u32,
    /// The state of its last look.
    pub(crate) known: u32,
    /// The map or merged segment it has uploaded.
    pub(crate) made: u8,
    /// What a listing showed.
    listed: Set,
    /// What it still has to delete.
    plan: Set,
    /// A truncation's choice.
    floor: u8,
    /// Steps whose commits it believes in, and those that it believes did not happen.
    pub(crate) committed: u32,
    pub(crate) failed: u32,
}

/// The request that an actor sends next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
enum Proc {
    /// The first of its step.
    #[default]
    Ready,
    Fold(Fold, Why),
    Create(Try),
    ReadBack(Try),
    Boundary(Try, Found),
}

/// One create of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Try {
    number: u8,
    entry: u32,
}

/// What is under the number of a create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Found {
    Mine,
    Other,
    Nothing,
}

/// What a fold is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Why {
    Look,
    Decide,
    Fate(Try),
    Committed,
}

/// The next read of a fold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Fold {
    Boundary,
    List { floor: u8 },
    Snapshot { floor: u8, numbers: u32 },
    Follow { from: u8, state: u32 },
    End { from: u8, state: u32, damaged: bool },
}

/// Why an actor does not go on.
#[derive(Debug)]
pub(crate) enum Stop {
    /// A rule is violated.
    Wrong(String),
    /// It gives up: refused, or without knowing what became of its commit.
    GivesUp,
}

impl From<String> for Stop {
    fn from(rule: String) -> Self {
        Self::Wrong(rule)
    }
}

const STOPPED: u8 = 255;

impl Actor {
    /// Is its next request a create in the log, the one kind of request that faults matter for?
    pub(crate) fn creates(&self) -> bool {
        matches!(self.proc, Proc::Create(_))
    }

    pub(crate) fn stop(&mut self) {
        let (committed, failed) = (self.committed, self.failed);
        *self = Self { at: STOPPED, committed, failed, ..Self::default() };
    }

    fn fails(&mut self) -> Stop {
        self.failed |= 1 << self.at;
        Stop::GivesUp
    }
}

impl Model {
    /// The step that an actor is at.
    fn step(&self, actor: &Actor, who: u8) -> Option<Step> {
        self.scripts[usize::from(who)].get(usize::from(actor.at)).copied()
    }

    /// How many requests an actor may send next.
    pub(crate) fn picks(&self, actor: &Actor, who: u8) -> u8 {
        match self.step(actor, who) {
            None => 0,
            Some(Step::Cut) => u8::try_from(actor.plan.count_ones()).unwrap(),
            Some(_) => 1,
        }
    }

    pub(crate) fn tell(&self, world: &World, step: Move) -> String {
        match step {
            Move::Arrive(which) => format!("a late create arrives: {:?}", world.late[usize::from(which)]),
            Move::Act { who, pick, fault } => {
                let actor = &world.actors[usize::from(who)];
                let entry = match actor.proc {
                    Proc::Create(this) => format!("{:?}", self.book.entry(this.entry).actions),
                    _ => String::new(),
                };
                format!("{who} pick {pick} {fault:?}: {:?} {:?} {entry}", self.step(actor, who), actor.proc)
            }
        }
    }

    /// Nobody is left who truncates: a fold is one step, since entries do not go any more and only its last read matters.
    fn whole_folds(&self, world: &World) -> bool {
        let truncates = |who: usize| self.scripts[who].contains(&Step::Raise);
        world.actors.iter().enumerate().all(|(who, actor)| actor.at == STOPPED || !truncates(who))
    }

    /// One request of one actor.
    pub(crate) fn act(
        &mut self,
        world: &mut World,
        actor: &mut Actor,
        who: u8,
        pick: u8,
        fault: Fault,
    ) -> Result<(), Stop> {
        match actor.proc {
            Proc::Ready => self.begin(world, actor, who, pick),
            Proc::Fold(fold, why) => self.fold(world, actor, who, (fold, why)),
            Proc::Create(this) => self.send(world, actor, this, fault),
            Proc::ReadBack(this) => {
                let mine = |entry| self.book.entry(entry).write == self.book.entry(this.entry).write;
                let found = match world.log.get(usize::from(this.number) - 1) {
                    Some(&entry) if entry != 0 && mine(entry) => Found::Mine,
                    Some(&entry) if entry != 0 => Found::Other,
                    _ => Found::Nothing,
                };
                self.found(world, actor, this, found)
            }
            Proc::Boundary(this, found) => {
                if read_boundary(world, actor) >= this.number {
                    actor.proc = Proc::Fold(Fold::Boundary, Why::Fate(this));
                    return Ok(());
                }
                self.settle(world, actor, this, found)
            }
        }
    }

    fn begin(&mut self, world: &mut World, actor: &mut Actor, who: u8, pick: u8) -> Result<(), Stop> {
        let Some(step) = self.step(actor, who) else { return Ok(()) };
        match step {
            Step::Look => return self.fold(world, actor, who, (Fold::Boundary, Why::Look)),
            Step::Commit(_) => return self.fold(world, actor, who, (Fold::Boundary, Why::Decide)),
            Step::List => actor.listed = world.objects,
            Step::PutPack | Step::PutSegment | Step::PutMap | Step::PutMoved | Step::PutMerged => {
                self.upload(world, actor, who, step);
            }
            Step::DeletePurged | Step::Sweep => return self.delete_one(world, actor, who),
            Step::Bound => {
                if self.book.state(actor.known).seq <= u64::from(read_boundary(world, actor)) {
                    actor.at += 3;
                }
            }
            Step::Snapshot => world.snapshots |= 1 << self.book.state(actor.known).seq,
            Step::Choose => {
                let floor = floor_at(world, actor.boundary);
                let known = self.book.state(actor.known);
                let alive = known.sessions.values().map(|session| session.touched).min().unwrap_or(u64::MAX);
                let usable =
                    |number: &u8| *number > floor && u64::from(*number) <= known.seq.min(alive.saturating_sub(1));
                actor.floor = members(world.snapshots.into()).filter(usable).max().unwrap_or(0);
            }
            Step::Raise => {
                if actor.floor != 0 && world.boundaries.len() == usize::from(actor.boundary) {
                    world.boundaries.push(actor.floor);
                }
            }
            Step::ListCut => {
                let read = read_boundary(world, actor);
                let floor = if self.broken(Mutation::CutFirst) { actor.floor } else { read };
                let entries = (0..floor).filter(|&n| world.log.get(usize::from(n)).is_some_and(|&entry| entry != 0));
                let snapshots = members(world.snapshots.into()).filter(|&number| number < floor);
                let entries = entries.fold(0, |set: Set, n| set | 1 << n);
                actor.plan = entries | snapshots.fold(0, |set: Set, n| set | 1 << (64 + n));
            }
            Step::Cut => {
                let gone = members(actor.plan).nth(pick.into()).unwrap();
                match gone.checked_sub(64) {
                    Some(number) => world.snapshots &= !(1 << number),
                    None => world.log[usize::from(gone)] = 0,
                }
                actor.plan &= !(1 << gone);
                self.meet("cut");
                if actor.plan != 0 {
                    return Ok(());
                }
            }
        }
        self.advance(world, actor, who);
        Ok(())
    }

    fn upload(&mut self, world: &mut World, actor: &mut Actor, who: u8, step: Step) {
        let object = match step {
            Step::PutPack => self.own_pack(who),
            Step::PutSegment => self.own_segment(who),
            Step::PutMap => {
                let packs = 1 << self.own_pack(who) | self.targets(actor.known, who);
                self.book.object(Family::Map, who, packs)
            }
            Step::PutMoved => {
                let own = 1 << self.own_pack(who);
                self.book.object(Family::Map, who, own)
            }
            _ => self.book.object(Family::Index, who, self.merged(actor.known).1),
        };
        world.objects |= 1 << object;
        if !matches!(step, Step::PutPack | Step::PutSegment) {
            actor.made = object;
        }
    }

    /// To the next step that has something to do. Who is done forgets everything but what it believes.
    fn advance(&mut self, world: &mut World, actor: &mut Actor, who: u8) {
        actor.proc = Proc::Ready;
        loop {
            actor.at += 1;
            let known = self.book.known(actor.known);
            let nothing = match self.step(actor, who) {
                None => return actor.stop(),
                Some(Step::DeletePurged) => {
                    let open = known.state.purged.iter().filter(|(_, purged)| !purged.deleted).map(|(pack, _)| pack);
                    actor.plan = self.book.pack_set(open);
                    actor.plan == 0
                }
                Some(Step::Sweep) => {
                    let kept = known.needs | known.listed;
                    let kept = kept | self.book.pack_set(known.state.condemned.keys().chain(known.state.purged.keys()));
                    let open = |n: &u8| known.state.sessions.contains_key(&self.book.id(*n).session);
                    actor.plan = members(actor.listed & !kept).filter(|n| !open(n)).fold(0, |set, n| set | 1 << n);
                    actor.plan == 0
                }
                Some(Step::Cut) => actor.plan == 0,
                Some(Step::PutMerged) if self.merged(actor.known).1 == 0 => true,
                // Nobody lists: when an upload happens, nobody can tell.
                Some(step @ (Step::PutPack | Step::PutSegment | Step::PutMap | Step::PutMoved | Step::PutMerged))
                    if !self.sweeps =>
                {
                    self.upload(world, actor, who, step);
                    true
                }
                Some(_) => false,
            };
            if !nothing {
                return;
            }
        }
    }

    fn delete_one(&mut self, world: &mut World, actor: &mut Actor, who: u8) -> Result<(), Stop> {
        let gone: Set = actor.plan & actor.plan.wrapping_neg();
        let needs = self.book.known(self.book.history(world.history).state).needs;
        if needs & gone != 0 {
            return Err(Stop::Wrong(format!("what is needed is deleted: {:?}", self.book.ids(gone))));
        }
        if world.objects & gone != 0 {
            self.meet("object deleted");
        }
        world.objects &= !gone;
        actor.plan &= !gone;
        if actor.plan == 0 {
            self.advance(world, actor, who);
        }
        Ok(())
    }

    /// fold.rs, one read.
    fn fold(&mut self, world: &mut World, actor: &mut Actor, who: u8, (fold, why): (Fold, Why)) -> Result<(), Stop> {
        if self.whole_folds(world) {
            return self.folded(world, actor, who, (self.book.history(world.history).state, why));
        }
        let seq = |model: &Self, state| u8::try_from(model.book.state(state).seq).unwrap();
        let next = match fold {
            Fold::Boundary => {
                let floor = read_boundary(world, actor);
                let from = seq(self, actor.seen);
                if actor.seen != 0 && from >= floor {
                    Fold::Follow { from, state: actor.seen }
                } else {
                    Fold::List { floor }
                }
            }
            Fold::List { floor } => {
                let above = u32::MAX << floor.max(1);
                let numbers = (world.snapshots | 1 << floor) & above;
                if numbers == 0 { Fold::Follow { from: 0, state: 0 } } else { Fold::Snapshot { floor, numbers } }
            }
            Fold::Snapshot { floor, numbers } => {
                let newest = numbers.ilog2();
                let rest = numbers & !(1 << newest);
                if world.snapshots & 1 << newest != 0 {
                    let from = u8::try_from(newest).unwrap();
                    Fold::Follow { from, state: self.book.state_at(world.history, from) }
                } else if rest != 0 {
                    Fold::Snapshot { floor, numbers: rest }
                } else if floor == 0 {
                    Fold::Follow { from: 0, state: 0 }
                } else {
                    Fold::Boundary
                }
            }
            Fold::Follow { from, state } => match world.log.get(usize::from(seq(self, state))) {
                Some(&entry) if entry != 0 => match self.book.apply(state, entry) {
                    Some(state) => Fold::Follow { from, state },
                    None if self.broken(Mutation::DamageBeforeBoundary) => {
                        return Err(Stop::Wrong("a fold calls a sound log damaged".to_owned()));
                    }
                    None => Fold::End { from, state, damaged: true },
                },
                _ => Fold::End { from, state, damaged: false },
            },
            Fold::End { from, state, damaged } => {
                if read_boundary(world, actor) <= from || self.broken(Mutation::NoBoundaryAfterFold) {
                    if damaged {
                        return Err(Stop::Wrong("a fold calls a sound log damaged".to_owned()));
                    }
                    return self.folded(world, actor, who, (state, why));
                }
                self.meet(if damaged { "fold spoilt by a stray" } else { "fold overtaken by a boundary" });
                Fold::Boundary
            }
        };
        actor.proc = Proc::Fold(next, why);
        Ok(())
    }

    /// A fold is done.
    fn folded(&mut self, world: &mut World, actor: &mut Actor, who: u8, (state, why): (u32, Why)) -> Result<(), Stop> {
        let seq = self.book.state(state).seq;
        let truth = self.book.history(world.history);
        if u64::from(truth.len) < seq || self.book.state_at(world.history, u8::try_from(seq).unwrap()) != state {
            return Err(Stop::Wrong(format!("a fold finds another state after entry {seq} than the true one")));
        }
        let whole = self.whole_folds(world);
        if whole || self.book.state(actor.seen).seq < seq {
            actor.seen = if whole { 0 } else { state };
        }
        match why {
            Why::Look => {
                actor.known = state;
                self.advance(world, actor, who);
                Ok(())
            }
            Why::Committed => {
                self.advance(world, actor, who);
                Ok(())
            }
            Why::Decide => self.decide(world, actor, who, state),
            Why::Fate(this) => self.fate(world, actor, this, state),
        }
    }

    fn decide(&mut self, world: &mut World, actor: &mut Actor, who: u8, state: u32) -> Result<(), Stop> {
        let Some(Step::Commit(act)) = self.step(actor, who) else { return Ok(()) };
        let Some(entry) = self.entry(actor, who, act, state) else { return Err(actor.fails()) };
        if entry.actions.is_empty() {
            self.advance(world, actor, who);
            return Ok(());
        }
        if self.book.state(state).check(&entry).is_err() {
            self.meet("commit refused");
            return Err(actor.fails());
        }
        let number = u8::try_from(self.book.state(state).seq + 1).unwrap();
        actor.proc = Proc::Create(Try { number, entry: self.book.file_entry(entry) });
        Ok(())
    }

    /// commit.rs: the create itself.
    fn send(&mut self, world: &mut World, actor: &mut Actor, this: Try, fault: Fault) -> Result<(), Stop> {
        let made = match fault {
            Fault::None | Fault::Lost => {
                let made = self.create(world, this.number, this.entry)?;
                let len = self.book.history(world.history).len;
                if made && this.number == len && self.book.entry_at(world.history, len) == this.entry {
                    let entry = self.book.entry(this.entry).clone();
                    self.made(world, actor, &entry, len)?;
                }
                made && fault == Fault::None
            }
            Fault::Failed => false,
            Fault::Late => {
                world.late.push((this.number, this.entry));
                world.late.sort_unstable();
                false
            }
        };
        if made && self.broken(Mutation::NoBoundaryAfterCreate) {
            return self.settle(world, actor, this, Found::Mine);
        }
        if made {
            return self.found(world, actor, this, Found::Mine);
        }
        if fault == Fault::None && self.broken(Mutation::BelieveExists) {
            return self.settle(world, actor, this, Found::Other);
        }
        actor.proc = Proc::ReadBack(this);
        Ok(())
    }

    /// commit.rs: what is there is known.
    fn found(&mut self, world: &mut World, actor: &mut Actor, this: Try, found: Found) -> Result<(), Stop> {
        // Without any truncation the boundary says nothing.
        if world.boundaries.is_empty() && self.whole_folds(world) {
            return self.settle(world, actor, this, found);
        }
        actor.proc = Proc::Boundary(this, found);
        Ok(())
    }

    /// commit.rs: the boundary is below the entry, so what is there is true.
    fn settle(&mut self, world: &mut World, actor: &mut Actor, this: Try, found: Found) -> Result<(), Stop> {
        match found {
            Found::Mine => return self.committed(world, actor, this),
            Found::Other => {
                self.meet("race lost");
                actor.proc = Proc::Ready;
            }
            Found::Nothing => actor.proc = Proc::Create(this),
        }
        Ok(())
    }

    /// commit.rs: the boundary has passed the entry, so the state tells.
    fn fate(&mut self, world: &mut World, actor: &mut Actor, this: Try, state: u32) -> Result<(), Stop> {
        let (state, entry) = (self.book.state(state), self.book.entry(this.entry));
        let open = entry.session.and_then(|id| state.sessions.get(&id));
        let mine = match open {
            Some(session) if session.last_write == entry.write => true,
            Some(session) if session.touched < this.number.into() => false,
            _ if shows(state, entry, this.number, self.broken(Mutation::FateByVersion)) => true,
            _ => {
                self.meet("fate unknown");
                return Err(Stop::GivesUp);
            }
        };
        self.meet(if mine { "committed, the state says" } else { "lost, the state says" });
        if mine { self.committed(world, actor, this) } else { self.settle(world, actor, this, Found::Other) }
    }

    /// An actor believes that its entry is number `number`.
    fn committed(&mut self, world: &mut World, actor: &mut Actor, this: Try) -> Result<(), Stop> {
        actor.committed |= 1 << actor.at;
        let truth = self.book.entry_at(world.history, this.number);
        if self.book.entry(truth).write != self.book.entry(this.entry).write {
            return Err(Stop::Wrong("a writer believes in a commit that is another's".to_owned()));
        }
        let who = self.book.entry(this.entry).write.to_bytes()[0];
        if self.whole_folds(world) {
            self.advance(world, actor, who);
        } else {
            actor.proc = Proc::Fold(Fold::Boundary, Why::Committed);
        }
        Ok(())
    }

    pub(crate) fn own_pack(&mut self, who: u8) -> u8 {
        self.book.object(Family::Pack, who, 0)
    }

    pub(crate) fn own_segment(&mut self, who: u8) -> u8 {
        let pack = self.own_pack(who);
        self.book.object(Family::Index, who, 1 << pack)
    }

    /// Other sessions' packs that a writer who knows `known` dedups against.
    fn targets(&self, known: u32, who: u8) -> Set {
        let known = self.book.known(known);
        let target = |n: &u8| known.state.is_target(&self.book.id(*n)) && owner(self.book.id(*n)) != who;
        members(known.listed).filter(target).fold(0, |set, n| set | 1 << n)
    }

    /// The known segments that list purged packs, and what else they list.
    pub(crate) fn merged(&self, known: u32) -> (Set, Set) {
        let known = self.book.known(known);
        let purged = self.book.pack_set(known.state.purged.keys());
        let segments = known.state.segments.keys().map(|id| self.book.find(Family::Index, *id));
        let stale = segments.filter(|&n| self.book.packs(n) & purged != 0);
        let (old, packs) = stale.fold((0, 0), |(old, packs), n| (old | 1 << n, packs | self.book.packs(n)));
        (old, packs & !purged)
    }

    pub(crate) fn write_of(actor: &Actor, who: u8) -> towline::id::WriteId {
        write_id(who, actor.at)
    }
}

/// Reads how far the log is truncated: boundary objects are dense and never deleted, so walking them is one step.
fn read_boundary(world: &World, actor: &mut Actor) -> u8 {
    actor.boundary = u8::try_from(world.boundaries.len()).unwrap();
    floor_at(world, actor.boundary)
}

fn floor_at(world: &World, boundary: u8) -> u8 {
    boundary.checked_sub(1).map_or(0, |n| world.boundaries[usize::from(n)])
}
