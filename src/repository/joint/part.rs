//! Part of a step that one rank has saved.
//!
//! Body of an envelope of kind 'H': rank, entry of the state in which it found packs of other sessions, then the value of the
//! rank's own tree, encoded as in the log.

use crate::error::{Error, Result};
use crate::format::wire::{Reader, Writer};
use crate::id::SessionId;
use crate::repository::log::RefValue;

/// One rank's part of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankPart {
    /// The rank.
    pub rank: u32,
    /// Entry of the state in which the rank found packs of other sessions.
    pub known: u64,
    /// Value of the rank's part: a tree of only its own files.
    pub value: RefValue,
}

impl RankPart {
    /// The body's bytes.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new();
        out.varint(self.rank.into()).varint(self.known);
        self.value.write(&mut out);
        out.into_bytes()
    }

    /// Reads a body.
    ///
    /// # Errors
    /// Damaged.
    pub fn decode(body: &[u8]) -> Result<Self> {
        let mut reader = Reader::new(body);
        let (rank, known) = (reader.varint32()?, reader.varint()?);
        let value = RefValue::read(&mut reader)?;
        reader.finish()?;
        Ok(Self { rank, known, value })
    }

    /// Reads the body of the part of `rank` under `session`, and checks that the objects it refers to belong to that session.
    ///
    /// # Errors
    /// Damaged.
    pub(super) fn decode_as(body: &[u8], session: SessionId, rank: u32) -> Result<Self> {
        let part = Self::decode(body)?;
        let homes = [part.value.manifest_key.session, part.value.map_key.session];
        if part.rank == rank && homes == [session; 2] {
            return Ok(part);
        }
        Err(Error::damaged("part is of another rank or session").expected(rank).got(part.rank))
    }
}
