//! The log's protocol, explored.
//!
//! **Worlds** (`scenarios`, over `explore`, `model`, `actor`, `client`, `decide`, `book`). The log's real `State::check`, `apply` and
//! `check_packs`, and its encodings there and back at each step, under a store and actors modelled at the grain of one request:
//! writers (look, open, upload, add a segment, reuse a pack known from before, save), two ranks that save one step (join, upload,
//! put a part, gather, complete; coming twice), `cp`, `rm`, collectors (condemn,
//! mark again, pardon or purge, delete, log the deletion, replace segments, repack, fence, list and sweep), truncations.
//! fold.rs, commit.rs and truncate.rs are mirrored request by request. Each scenario is searched breadth first until no new
//! world is left, or the test fails. Checked in every world: what refs and live segments name exists; nothing relies on
//! what was ever purged, and a purge is remembered while a live segment lists the pack; no writer believes wrongly of its
//! commit, none is applied twice; no attempt of ranks is complete twice; every fold ends in the true state and none calls the log damaged; nothing needed is
//! deleted; no session is fenced that moved.
//!
//! Bounds: 2 to 4 actors, each runs its script once; at most as many faults as the scenario says (0 to 2), each
//! hits a create in the log: its answer is lost, it does not happen, or it happens any time later. Crashes and stalls are
//! not counted: everybody may stand still for ever anywhere. Uploads, reads and deletes do not fail: they are repeated
//! until they succeed, and repeating them changes nothing. Reads of a boundary are one step, since boundaries are never
//! deleted; folds are one step where nobody is left who truncates. A manifest stands and falls with its map and is not
//! modelled. A rank's part is created in one step, and parts of sessions that are over stay. Two `cp` of one source to one name at the same time are not told apart: they commit the same.
//!
//! Each rule that the model's driver leaves out (`Mutation`) must be missed somewhere, and each scenario must have met the
//! hazards that it is there for.
//!
//! **Schedules** (`schedules`, over `schedule`, `gate`). The real `Log` on a store in memory whose every request waits for
//! a scheduler: all schedules of small casts with at most two switches of actor or with one switch and one fault (lost
//! answer, request lost, late create, crash), and thousands at random. Read-ahead and deletes may be answered in any order.
//! Checked: outcomes against the true history, each state that is handed out, a stranger's fold at the end.
//!
//! One seed, with its story: `SIM_SEED=17 cargo test --test sim random -- --nocapture`. A failing systematic schedule prints
//! its plan: the chances that it took, by number. The counts of worlds and schedules: `cargo test --test sim -- --nocapture`.

#[cfg(test)]
mod actor;
#[cfg(test)]
mod book;
#[cfg(test)]
mod client;
#[cfg(test)]
mod decide;
#[cfg(test)]
mod explore;
#[cfg(test)]
mod gate;
#[cfg(test)]
mod model;
#[cfg(test)]
mod scenarios;
#[cfg(test)]
mod schedule;
#[cfg(test)]
mod schedules;
