//! Maps that name each pack. Repositories have many packs, which many maps share: maps are kept as numbers.

use std::collections::{BTreeMap, BTreeSet};

use crate::budget::GrowingMemory;
use crate::error::Result;
use crate::id::{MapKey, PackId};

/// Bytes of memory of a map, in the nodes of its tree and in the list.
const MAP_WEIGHT: usize = 2 * size_of::<(MapKey, u32)>() + 2 * size_of::<MapKey>();
/// Bytes of memory of a pack, and of the first node of its maps.
const PACK_WEIGHT: usize = 2 * size_of::<(PackId, BTreeSet<u32>)>() + 80;
/// Bytes of memory of each map of a pack.
const NUMBER_WEIGHT: usize = 3 * size_of::<u32>();

/// Maps that name each pack.
#[derive(Debug, Default)]
pub(super) struct Users {
    maps: Vec<MapKey>,
    /// Places of the maps in that list.
    numbers: BTreeMap<MapKey, u32>,
    packs: BTreeMap<PackId, BTreeSet<u32>>,
}

impl Users {
    /// Notes that `map` names `packs`; what it takes is added to `memory`.
    ///
    /// # Errors
    /// Exhausted, if there is too little memory.
    pub(super) fn add(
        &mut self,
        map: MapKey,
        packs: impl Iterator<Item = PackId>,
        memory: &mut GrowingMemory,
    ) -> Result<()> {
        let number = match self.numbers.get(&map) {
            Some(number) => *number,
            None => {
                memory.add(MAP_WEIGHT as u64)?;
                let number = u32::try_from(self.maps.len()).unwrap_or(u32::MAX);
                self.maps.push(map);
                self.numbers.insert(map, number);
                number
            }
        };
        for pack in packs {
            let known = if self.packs.contains_key(&pack) { 0 } else { PACK_WEIGHT };
            memory.add((known + NUMBER_WEIGHT) as u64)?;
            self.packs.entry(pack).or_default().insert(number);
        }
        Ok(())
    }

    /// True if any map names `pack`.
    pub(super) fn has(&self, pack: &PackId) -> bool {
        self.packs.contains_key(pack)
    }

    /// Maps that name `pack`.
    pub(super) fn of(&self, pack: &PackId) -> impl Iterator<Item = MapKey> {
        let numbers = self.packs.get(pack).into_iter().flatten();
        numbers.filter_map(|number| self.maps.get(*number as usize).copied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::budget::Budget;
    use crate::error::ErrorKind;
    use crate::id::{Owned, SessionId};
    use crate::limits::MEMORY_MIN;

    #[test]
    fn maps_of_each_pack_are_known_and_counted() {
        let budget = Budget::new(MEMORY_MIN).unwrap();
        let (mut users, mut memory) = (Users::default(), budget.keep_growing());
        let session = SessionId::random();
        let [one, two] = [(); 2].map(|()| Owned::fresh(session));
        let packs: Vec<PackId> = (0..1_000).map(|_| Owned::fresh(session)).collect();
        for (map, packs) in [(one, &packs[..600]), (two, &packs[400..]), (one, &packs[..1])] {
            users.add(map, packs.iter().copied(), &mut memory).unwrap();
        }
        let of = |pack: &PackId| users.of(pack).collect::<Vec<_>>();
        assert_eq!([of(&packs[0]), of(&packs[500]), of(&packs[999])], [vec![one], vec![one, two], vec![two]]);
        assert!(users.has(&packs[0]) && !users.has(&Owned::fresh(session)));
        let counted = (1_000 * PACK_WEIGHT + 1_200 * NUMBER_WEIGHT) as u64;
        assert!(budget.keep(budget.kept_max() - counted).is_err());
        let more = (0..1_000_000).map(|_| Owned::fresh(session));
        let error = users.add(Owned::fresh(session), more, &mut memory).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Exhausted, "{error:?}");
    }
}
