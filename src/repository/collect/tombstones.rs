//! Tombstones: a collect first lists unneeded objects; they are deleted once the list is older than the grace.
//!
//! Anybody with write access can claim in the log that live objects are unneeded. The age of a list is measured by the store's
//! clock, which no writer can set back. So nothing is deleted earlier than one grace period after such a claim.
//!
//! Body of an object of kind 'D': `[n]` of family (1: 0 pack, 1 index, 2 manifest, 3 map, 4 part), session (16), object (16).

use futures::{StreamExt as _, TryStreamExt as _, stream};
use object_store::ObjectMeta;
use object_store::path::Path;

use crate::budget::Retained;
use crate::clock::Timestamp;
use crate::error::{Error, ErrorKind, Result};
use crate::format::envelope::{Kind, seal};
use crate::format::wire::{Read, Reader, Writer};
use crate::id::{ObjectId, Owned, SessionId};
use crate::repository::Repository;
use crate::repository::layout::{self, Family};
use crate::repository::listing::listed;
use crate::repository::objects;

/// Maximum number of objects in one list: 8.6 MB with their keys.
const LIST_MAX: usize = 1 << 18;
/// Bytes of one object in a list.
const ITEM_LEN: usize = 33;
/// Lists read at once.
const READS: usize = 4;

/// An object of a session: its kind and id.
pub type Item = (Family, Owned);

/// One list of unneeded objects.
#[derive(Debug)]
pub struct Tombstone {
    /// Key of the list.
    pub key: Path,
    /// Time of its creation, by the store's clock.
    pub written: Timestamp,
    /// The objects in it, sorted, each once.
    pub items: Vec<Item>,
    /// Memory of the list, counted in the budget.
    #[expect(dead_code, reason = "held for its drop")]
    memory: Retained,
}

/// The body of a list.
#[must_use]
pub fn encode(items: &[Item]) -> Vec<u8> {
    let mut out = Writer::new();
    out.count(items.len());
    for (family, id) in items {
        out.u8(code(*family)).bytes(&id.session.to_bytes()).bytes(&id.object.to_bytes());
    }
    out.into_bytes()
}

/// Reads the body of a list, with at most `memory` bytes of memory.
///
/// # Errors
/// Damaged; exhausted, if `memory` is too little.
pub fn decode_within(body: &[u8], memory: u64) -> Result<Vec<Item>> {
    let mut reader = Reader::within(body, memory);
    let count = reader.count(ITEM_LEN)?;
    reader.keep_all::<Item>(count)?;
    let items = (0..count).map(|_| item(&mut reader)).collect::<Read<Vec<_>>>()?;
    reader.finish()?;
    Ok(items)
}

fn item(reader: &mut Reader<'_>) -> Read<Item> {
    let number = reader.u8()?;
    let Some(family) = Family::ALL.into_iter().find(|family| code(*family) == number) else {
        return Err(reader.malformed("unknown kind of object"));
    };
    Ok((
        family,
        Owned { session: SessionId::from_bytes(reader.array()?), object: ObjectId::from_bytes(reader.array()?) },
    ))
}

const fn code(family: Family) -> u8 {
    match family {
        Family::Pack => 0,
        Family::Index => 1,
        Family::Manifest => 2,
        Family::Map => 3,
        Family::Part => 4,
    }
}

/// Reads every list, and keeps the items that `wanted` selects. An unreadable list counts as empty, which restarts the grace of
/// its objects.
///
/// # Errors
/// Unreachable, if the store is; exhausted, if a list does not fit into the memory budget.
///
/// # Cancel safety
/// Safe: it only reads.
pub async fn read(repository: &Repository, wanted: impl Fn(&Item) -> bool) -> Result<Vec<Tombstone>> {
    let pick = |meta: ObjectMeta| {
        let written = Timestamp(meta.last_modified.timestamp_nanos_opt().unwrap_or(i64::MAX));
        layout::is_tombstone(&meta.location).then_some((meta.location, written))
    };
    let heap = |(key, _): &(Path, Timestamp)| key.as_ref().len();
    let store = &**repository.store().objects();
    let (listed, _memory) = listed(store, repository.budget(), &layout::tombstones(), pick, heap).await?;
    let read = listed.into_iter().map(|(key, written)| async move {
        let items = match items(repository, &key).await {
            Err(error) if error.kind() == ErrorKind::Damaged => {
                tracing::warn!("cannot read a list of unneeded objects, whose grace begins again: {error:?}");
                Vec::new()
            }
            items => items?,
        };
        Ok::<_, Error>((key, written, items))
    });
    let mut read = stream::iter(read.collect::<Vec<_>>()).buffered(READS);
    let mut tombstones = Vec::new();
    while let Some((key, written, mut items)) = read.try_next().await? {
        items.retain(&wanted);
        items.sort_unstable();
        items.dedup();
        items.shrink_to_fit();
        let memory = repository.budget().keep((size_of::<Tombstone>() + size_of_val(&*items)) as u64)?;
        tombstones.push(Tombstone { key, written, items, memory });
    }
    Ok(tombstones)
}

async fn items(repository: &Repository, key: &Path) -> Result<Vec<Item>> {
    let objects = &**repository.store().objects();
    // Another collect may have removed it.
    let Some(body) = objects::body(objects, repository.budget(), Kind::Tombstone, key).await? else {
        return Ok(Vec::new());
    };
    objects::decode(repository.budget(), &body, decode_within).await.map_err(|error| error.at(key))
}

/// Lists `items` as unneeded from now on.
///
/// # Errors
/// Unreachable, if the store is.
///
/// # Cancel safety
/// Safe: what was not listed is listed by the next collect.
pub async fn write(repository: &Repository, session: SessionId, items: &[Item]) -> Result<()> {
    for part in items.chunks(LIST_MAX) {
        let object = seal(Kind::Tombstone, &encode(part), true);
        let key = layout::tombstone(Owned::fresh(session));
        objects::put(&**repository.store().objects(), &key, object.into()).await?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_is_read_as_it_was_written() {
        let items: Vec<Item> =
            Family::ALL.into_iter().map(|family| (family, Owned::fresh(SessionId::random()))).collect();
        let body = encode(&items);
        assert_eq!(decode_within(&body, u64::MAX).unwrap(), items);
        for cut in 0..body.len() {
            assert_eq!(decode_within(&body[..cut], u64::MAX).unwrap_err().kind(), ErrorKind::Damaged, "{cut}");
        }
        assert_eq!(decode_within(&body, 10).unwrap_err().kind(), ErrorKind::Exhausted);
        let mut unknown = body;
        unknown[1] = 9;
        assert_eq!(decode_within(&unknown, u64::MAX).unwrap_err().kind(), ErrorKind::Damaged);
    }
}
