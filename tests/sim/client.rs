//! The log's client: what fold.rs and commit.rs do, request by request.

use super::actor::{Actor, Proc, Step, Stop};
use super::decide::shows;
use super::model::{Fault, Model, Mutation, World};

/// One create of a commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Try {
    pub(super) number: u8,
    pub(super) entry: u32,
}

/// Object under the number of a create.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Found {
    Mine,
    Other,
    Nothing,
}

/// Purpose of a fold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum FoldPurpose {
    Look,
    Decide,
    Fate(Try),
    Committed,
}

/// The next read of a fold.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Fold {
    Boundary,
    List { floor: u8 },
    Snapshot { floor: u8, numbers: u32 },
    Follow { from: u8, state: u32 },
    End { from: u8, state: u32, damaged: bool },
}

impl Model {
    /// fold.rs, one read.
    pub(super) fn fold(
        &mut self,
        world: &mut World,
        actor: &mut Actor,
        who: u8,
        (fold, why): (Fold, FoldPurpose),
    ) -> Result<(), Stop> {
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
    fn folded(
        &mut self,
        world: &mut World,
        actor: &mut Actor,
        who: u8,
        (state, why): (u32, FoldPurpose),
    ) -> Result<(), Stop> {
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
            FoldPurpose::Look => {
                actor.known = state;
                self.advance(world, actor, who);
                Ok(())
            }
            FoldPurpose::Committed => {
                self.advance(world, actor, who);
                Ok(())
            }
            FoldPurpose::Decide => self.decide(world, actor, who, state),
            FoldPurpose::Fate(this) => self.fate(world, actor, this, state),
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
    pub(super) fn send(&mut self, world: &mut World, actor: &mut Actor, this: Try, fault: Fault) -> Result<(), Stop> {
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
    pub(super) fn found(&mut self, world: &mut World, actor: &mut Actor, this: Try, found: Found) -> Result<(), Stop> {
        // Without any truncation the boundary says nothing.
        if world.boundaries.is_empty() && self.whole_folds(world) {
            return self.settle(world, actor, this, found);
        }
        actor.proc = Proc::Boundary(this, found);
        Ok(())
    }

    /// commit.rs: the boundary is below the entry, so what is there is true.
    pub(super) fn settle(&mut self, world: &mut World, actor: &mut Actor, this: Try, found: Found) -> Result<(), Stop> {
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
    pub(super) fn fate(&mut self, world: &mut World, actor: &mut Actor, this: Try, state: u32) -> Result<(), Stop> {
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
            actor.proc = Proc::Fold(Fold::Boundary, FoldPurpose::Committed);
        }
        Ok(())
    }
}

/// Reads how far the log is truncated: boundary objects are dense and never deleted, so walking them is one step.
pub(super) fn read_boundary(world: &World, actor: &mut Actor) -> u8 {
    actor.boundary = u8::try_from(world.boundaries.len()).unwrap();
    floor_at(world, actor.boundary)
}

pub(super) fn floor_at(world: &World, boundary: u8) -> u8 {
    boundary.checked_sub(1).map_or(0, |n| world.boundaries[usize::from(n)])
}
