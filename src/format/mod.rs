//! Stored formats: docs/format.md is the specification, tests/golden/v1 enforces it.

pub mod envelope;
mod inventory;
mod key_set;
mod manifest;
mod map;
mod pack;
mod segment;
mod signed;
mod usage;
pub mod wire;

pub use inventory::{
    BaseSet, CacheSpace, ChangedSet, INVENTORY_SETS, Inventory, InventoryHead, LinkRate, decode_base, encode_base,
};
pub use key_set::{FALSE_POSITIVES, KEYS_MAX, KeySet, Patch};
pub use manifest::{
    ChunkList, Content, EntryKind, Form, LABEL_LEN_MAX, Manifest, Piece, TensorEntry, TensorPart, TreeEntry,
};
pub use map::{Frame, Map, PackRef};
pub use pack::{FooterEntry, PackFooter, PackLayout, TRAILER_LEN, pack_header};
pub use segment::{Row, SegmentView, segment_bytes, segment_len_max};
pub use signed::SignedBytes;
pub use usage::{Direction, Month, UsageKey, UsageReport, UsageTotals};
