//! Breadth first through every world that the moves lead to.

use std::collections::{BTreeMap, HashSet, VecDeque};
use std::fmt;
use std::hash::{Hash, Hasher};

use super::model::{Model, Move, World};

/// An exploration that grows beyond this is no small one.
const WORLDS_MAX: usize = 4_000_000;

/// Result of an exploration.
#[derive(Debug)]
pub(crate) struct Report {
    pub(crate) worlds: usize,
    pub(crate) moves: u64,
    pub(crate) met: BTreeMap<&'static str, u64>,
    /// The rule that was violated, and the shortest way there.
    pub(crate) violation: Option<(String, Vec<String>)>,
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} worlds, {} moves; met: {:?}", self.worlds, self.moves, self.met)?;
        if let Some((rule, trace)) = &self.violation {
            write!(f, "\nVIOLATION: {rule}")?;
            trace.iter().try_for_each(|line| write!(f, "\n  {line}"))?;
        }
        Ok(())
    }
}

/// The bytes that a value hashes.
#[derive(Default)]
struct Bytes(Vec<u8>);

impl Hasher for Bytes {
    fn write(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn finish(&self) -> u64 {
        unreachable!("only the bytes are asked for")
    }
}

/// Worlds are told apart by 128 bits of BLAKE3: two of ten million collide once in 10^24 explorations.
fn fingerprint(world: &World, bytes: &mut Bytes) -> u128 {
    bytes.0.clear();
    world.hash(bytes);
    let digest = *blake3::hash(&bytes.0).as_bytes();
    u128::from_le_bytes(digest[..16].try_into().unwrap())
}

/// Visits every world reachable from `start`, or stops at the first violation.
pub(crate) fn explore(model: &mut Model, start: &World) -> Report {
    let mut bytes = Bytes::default();
    let mut visited = HashSet::from([fingerprint(start, &mut bytes)]);
    let mut ways: Vec<(u32, Option<Move>)> = vec![(0, None)];
    let mut front = VecDeque::from([(0u32, start.clone())]);
    let mut moves = 0;
    while let Some((number, world)) = front.pop_front() {
        assert!(ways.len() < WORLDS_MAX, "more than {WORLDS_MAX} worlds: {:?}", model.met);
        for step in model.moves(&world) {
            moves += 1;
            match model.go(&world, step) {
                Ok(next) => {
                    if visited.insert(fingerprint(&next, &mut bytes)) {
                        front.push_back((u32::try_from(ways.len()).unwrap(), next));
                        ways.push((number, Some(step)));
                    }
                }
                Err(rule) => {
                    let trace = retrace(model, start, &ways, number, step);
                    let met = model.met.clone();
                    return Report { worlds: visited.len(), moves, met, violation: Some((rule, trace)) };
                }
            }
        }
    }
    Report { worlds: visited.len(), moves, met: model.met.clone(), violation: None }
}

/// The way to a violation, told move by move.
fn retrace(model: &mut Model, start: &World, ways: &[(u32, Option<Move>)], end: u32, last: Move) -> Vec<String> {
    let mut steps = vec![last];
    let mut at = end;
    while let (before, Some(step)) = ways[at as usize] {
        steps.push(step);
        at = before;
    }
    let mut world = start.clone();
    let mut told = Vec::new();
    for step in steps.into_iter().rev() {
        told.push(model.tell(&world, step));
        match model.go(&world, step) {
            Ok(next) => world = next,
            Err(_) => break,
        }
    }
    told
}
