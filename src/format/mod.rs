//! Stored formats: docs/format.md is the specification, tests/golden/v1 enforces it.

pub mod envelope;
mod manifest;
mod map;
mod pack;
mod segment;
pub mod wire;

pub use manifest::{ChunkList, Content, EntryKind, Form, Manifest, Piece, TensorEntry, TensorPart, TreeEntry};
pub use map::{Frame, Map, PackRef};
pub use pack::{FooterEntry, PackFooter, PackLayout, TRAILER_LEN, pack_header};
pub use segment::{Row, SegmentView, segment_bytes};
