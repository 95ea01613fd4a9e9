//! An actor: a script of steps, each some requests to the store; truncate.rs is mirrored here, the rest of the log's
//! requests in `client`. Local work happens at the end of the request before it.
//!
//! A crash is a move that never comes: every world is checked, also those in which somebody stands still for ever.

use towline::repository::layout::Family;

use super::book::{Set, joint_in, members, owner, write_id};
use super::client::{Fold, FoldPurpose, Found, Try, floor_at, read_boundary};
use super::model::{Fault, Model, Move, Mutation, Part, World};

/// One step of an actor's script.
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
    /// Upload this rank's pack under the joint session that is known; all is done if none is.
    PutRankPack(u8),
    /// Upload the segment that lists it.
    PutRankSegment(u8),
    /// Create this rank's part: its own pack and all that is known and a dedup target.
    PutPart(u8),
    /// Read the parts of so many ranks; all is done unless all are there.
    Gather(u8),
    /// Upload the map of all of them.
    PutUnion,
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

/// Commit of an actor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Open,
    AddSegment,
    Save(&'static str),
    Copy(&'static str, &'static str),
    Remove(&'static str),
    /// Remove a name and keep what it stood for.
    RemoveKept(&'static str),
    /// Take back what was kept of a name.
    Undelete(&'static str),
    /// Forget what is kept of a name.
    Forget(&'static str),
    /// Condemn what no ref needs.
    Condemn,
    /// Condemn session n's first own pack as damaged.
    CondemnDamaged(u8),
    /// Pardon or purge what is condemned.
    Judge,
    Deleted,
    Replace,
    /// Chunks of a name have moved to an own pack: swap its map, condemn what it needed.
    Repack(&'static str),
    Fence(u8),
    /// Fence the joint session that is known.
    FenceJoint,
    /// Open a joint session for the attempt, unless there is one or the attempt is complete.
    Join,
    /// Add the segment of this rank's pack.
    AddRank(u8),
    /// Make the union visible, unless the session is over.
    Complete,
    Renew,
    Close,
}

/// Where an actor stands.
#[derive(Clone, Debug, Default, Hash)]
pub(crate) struct Actor {
    /// Its step; `STOPPED` once it gave up.
    pub(crate) at: u8,
    pub(super) proc: Proc,
    /// Knowledge of its process: the log's `Seen`.
    pub(crate) boundary: u8,
    pub(crate) seen: u32,
    /// The state of its last look.
    pub(crate) known: u32,
    /// The map or merged segment it has uploaded.
    pub(crate) made: u8,
    /// Result of a listing.
    listed: Set,
    /// Objects that it still has to delete.
    plan: Set,
    /// A truncation's choice.
    floor: u8,
    /// Steps whose commits it believes in, and those that it believes did not happen.
    pub(crate) committed: u32,
    pub(crate) failed: u32,
}

/// The request that an actor sends next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub(super) enum Proc {
    /// The first of its step.
    #[default]
    Ready,
    Fold(Fold, FoldPurpose),
    Create(Try),
    ReadBack(Try),
    Boundary(Try, Found),
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

    pub(super) fn fails(&mut self) -> Stop {
        self.failed |= 1 << self.at;
        Stop::GivesUp
    }
}

impl Model {
    /// The step that an actor is at.
    pub(super) fn step(&self, actor: &Actor, who: u8) -> Option<Step> {
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
    pub(super) fn whole_folds(&self, world: &World) -> bool {
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
                    actor.proc = Proc::Fold(Fold::Boundary, FoldPurpose::Fate(this));
                    return Ok(());
                }
                self.settle(world, actor, this, found)
            }
        }
    }

    fn begin(&mut self, world: &mut World, actor: &mut Actor, who: u8, pick: u8) -> Result<(), Stop> {
        let Some(step) = self.step(actor, who) else { return Ok(()) };
        match step {
            Step::Look => return self.fold(world, actor, who, (Fold::Boundary, FoldPurpose::Look)),
            Step::Commit(_) => return self.fold(world, actor, who, (Fold::Boundary, FoldPurpose::Decide)),
            Step::List => actor.listed = world.objects,
            Step::PutPart(rank) => self.put_part(world, actor, rank),
            Step::Gather(ranks) => {
                if !self.gather(world, actor, ranks) {
                    actor.stop();
                    return Ok(());
                }
            }
            Step::PutRankPack(_)
            | Step::PutRankSegment(_)
            | Step::PutUnion
            | Step::PutPack
            | Step::PutSegment
            | Step::PutMap
            | Step::PutMoved
            | Step::PutMerged => {
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
            Step::PutRankPack(rank) => self.rank_pack(actor.known, rank),
            Step::PutRankSegment(rank) => self.rank_segment(actor.known, rank),
            Step::PutUnion => actor.made,
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
        if matches!(step, Step::PutMap | Step::PutMoved | Step::PutMerged) {
            actor.made = object;
        }
    }

    /// To the next step that has something to do. Who is done forgets everything but what it believes.
    pub(super) fn advance(&mut self, world: &mut World, actor: &mut Actor, who: u8) {
        actor.proc = Proc::Ready;
        loop {
            actor.at += 1;
            let known = self.book.known(actor.known);
            let joint = joint_in(&known.state);
            let nothing = match self.step(actor, who) {
                None => return actor.stop(),
                // Complete, or ended.
                Some(Step::PutRankPack(_)) if joint.is_none() => return actor.stop(),
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
                Some(
                    step @ (Step::PutPack
                    | Step::PutSegment
                    | Step::PutMap
                    | Step::PutMoved
                    | Step::PutMerged
                    | Step::PutRankPack(_)
                    | Step::PutRankSegment(_)
                    | Step::PutUnion),
                ) if !self.sweeps => {
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

    /// The pack of a rank under the joint session that is known: there is one.
    fn rank_pack(&mut self, known: u32, rank: u8) -> u8 {
        let joint = joint_in(self.book.state(known)).unwrap();
        self.book.object(Family::Pack, joint, 1 << rank)
    }

    pub(crate) fn rank_segment(&mut self, known: u32, rank: u8) -> u8 {
        let joint = joint_in(self.book.state(known)).unwrap();
        let pack = self.rank_pack(known, rank);
        self.book.object(Family::Index, joint, 1 << pack)
    }

    /// A create: a part that is there stays.
    fn put_part(&mut self, world: &mut World, actor: &Actor, rank: u8) {
        let joint = joint_in(self.book.state(actor.known)).unwrap();
        let packs = 1 << self.rank_pack(actor.known, rank) | self.targets(actor.known, joint);
        if world.parts.iter().any(|part| (part.session, part.rank) == (joint, rank)) {
            self.meet("part there already");
            return;
        }
        world.parts.push(Part { session: joint, rank, packs, known: actor.known });
        world.parts.sort_unstable_by_key(|part| (part.session, part.rank));
    }

    /// Takes in the parts, if all are there: what they know is as old as the oldest of them.
    fn gather(&mut self, world: &World, actor: &mut Actor, ranks: u8) -> bool {
        let joint = joint_in(self.book.state(actor.known)).unwrap();
        let parts: Vec<&Part> = world.parts.iter().filter(|part| part.session == joint).collect();
        if parts.len() < usize::from(ranks) {
            self.meet("rank not the last");
            return false;
        }
        let packs = parts.iter().fold(0, |packs, part| packs | part.packs);
        actor.made = self.book.object(Family::Map, joint, packs);
        let oldest = parts.iter().map(|part| part.known).min_by_key(|known| self.book.state(*known).seq);
        actor.known = oldest.unwrap_or(actor.known);
        true
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
