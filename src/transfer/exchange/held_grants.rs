//! Memory of the lists of chunks that open requests of peers hold.
//!
//! A request holds the list of its tree until it ends, which its peer decides, and open trees are few. So a peer that asks for one chunk
//! of each of many trees, and takes nothing, would keep the lists of all of them in memory.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::error::{Error, Result};
use crate::identity::Identity;
use crate::size;
use crate::transfer::protocol::Grant;

/// The lists that requests hold, by peer.
#[derive(Debug, Default)]
pub(super) struct HeldGrants(Mutex<Vec<HeldGrant>>);

#[derive(Debug)]
struct HeldGrant {
    peer: Identity,
    grant: Weak<Grant>,
    bytes: u64,
}

impl HeldGrants {
    /// Counts `grant` for `peer` as long as anybody but `open`, the trees that are open in any case, holds it.
    ///
    /// # Errors
    /// Exhausted, if the lists of the peer would take more than half of what those of others leave of `most` bytes. One list alone, of
    /// any length, is held if nobody else holds one.
    pub(super) fn hold(&self, peer: &Identity, grant: &Arc<Grant>, open: &[Weak<Grant>], most: u64) -> Result<()> {
        let mut held = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        held.retain(|one| one.grant.strong_count() > usize::from(open.iter().any(|open| open.ptr_eq(&one.grant))));
        let (mut own, mut others) = (0, 0_u64);
        for one in held.iter() {
            if one.peer != *peer {
                others = others.saturating_add(one.bytes);
            } else if std::ptr::eq(one.grant.as_ptr(), Arc::as_ptr(grant)) {
                return Ok(());
            } else {
                own += one.bytes;
            }
        }
        let bytes = bytes_of(grant);
        let share = most.saturating_sub(others) / 2;
        let is_alone = own == 0 && others == 0;
        if own.saturating_add(bytes) > share && !is_alone {
            return Err(Error::exhausted(format!("requests of {peer} hold too many lists of chunks"))
                .expected(format!("at most {}", size::show(share)))
                .got(size::show(own.saturating_add(bytes))));
        }
        held.push(HeldGrant { peer: peer.clone(), grant: Arc::downgrade(grant), bytes });
        Ok(())
    }
}

/// Bytes of memory of a list.
fn bytes_of(grant: &Grant) -> u64 {
    let ids = size_of_val(&*grant.chunks.ids) + size_of_val(&*grant.chunks.lens);
    (ids + size_of_val(&*grant.bases)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use crate::format::ChunkList;
    use crate::id::ChunkId;

    /// A list of 3600 bytes.
    fn grant() -> Arc<Grant> {
        let chunks = ChunkList { ids: vec![ChunkId::of(b"chunk"); 100], lens: vec![1; 100] };
        Arc::new(Grant { chunks: Arc::new(chunks), bases: Vec::new() })
    }

    fn peer(name: &str) -> Identity {
        Identity::new("west", name).unwrap()
    }

    #[test]
    fn a_peer_holds_half_of_what_others_leave() {
        let (held, most) = (HeldGrants::default(), 10 * 3600);
        let grants: Vec<Arc<Grant>> = (0..10).map(|_| grant()).collect();
        let (one, two) = (peer("one"), peer("two"));
        let taken = grants.iter().take_while(|grant| held.hold(&one, grant, &[], most).is_ok()).count();
        assert_eq!(taken, 5);
        assert_eq!(held.hold(&one, &grants[6], &[], most).unwrap_err().kind(), ErrorKind::Exhausted);
        held.hold(&one, &grants[0], &[], most).expect("the same list counts once");
        let taken = grants.iter().take_while(|grant| held.hold(&two, grant, &[], most).is_ok()).count();
        assert_eq!(taken, 2, "half of the other half");
    }

    #[test]
    fn lists_that_no_request_holds_count_for_nobody() {
        let (held, one) = (HeldGrants::default(), peer("one"));
        for _ in 0..20 {
            held.hold(&one, &grant(), &[], 2 * 3600).unwrap();
        }
        let open: Vec<Arc<Grant>> = (0..20).map(|_| grant()).collect();
        let known: Vec<Weak<Grant>> = open.iter().map(Arc::downgrade).collect();
        for grant in &open {
            held.hold(&one, grant, &known, 2 * 3600).unwrap();
        }
        let _requested = Arc::clone(&open[19]);
        assert!(held.hold(&one, &grant(), &known, 2 * 3600).is_err());
    }

    #[test]
    fn one_list_of_any_length_is_held_alone() {
        let held = HeldGrants::default();
        let (first, second) = (grant(), grant());
        held.hold(&peer("one"), &first, &[], 100).unwrap();
        assert!(held.hold(&peer("two"), &second, &[], 100).is_err());
        drop(first);
        held.hold(&peer("two"), &second, &[], 100).unwrap();
    }
}
