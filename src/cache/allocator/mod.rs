//! Allocator of units in slabs. Pure.
//!
//! A frame takes consecutive units of 4 KiB, so it wastes less than one unit. It is placed by first fit: compared with next fit,
//! two ends and slabs for classes of lengths, first fit used the most space (89 to 92 % with lengths from 4 KiB to 4 MiB, equally
//! frequent in every order of magnitude; 93 % with those of tensors' chunks). If no free run is long enough, the caller evicts a
//! little more, and finally clears a region.
//!
//! A slab is divided into regions of 64 MiB, and no frame crosses a boundary. So a search reads the bits of only one region, and
//! clearing a region moves a bounded amount.

mod bits;
mod max_tree;

use std::ops::Range;

use self::bits::Bits;
use self::max_tree::MaxTree;

/// Bytes in a unit.
pub(super) const UNIT: u64 = UNIT_LEN as u64;
/// Bytes in a unit, as a buffer length.
pub(super) const UNIT_LEN: usize = 4096;
/// Maximum units of a region. With another number, chunks of an existing cache that cross the new boundaries would be dropped.
const REGION_UNITS: u32 = 16 << 10;

#[derive(Clone, Debug)]
struct Slab {
    regions: Vec<Region>,
    taken: u32,
}

#[derive(Clone, Debug)]
struct Region {
    bits: Bits,
    /// True if extents may be placed there.
    open: bool,
}

impl Region {
    /// Longest free run in which something can be placed.
    fn run(&self) -> u32 {
        if self.open { self.bits.longest() } else { 0 }
    }
}

/// Units of all slabs. A place is the number of a unit, counted over slabs of equal length, including missing ones.
#[derive(Clone, Debug)]
pub(super) struct Allocator {
    slabs: Vec<Option<Slab>>,
    slab_units: u32,
    /// Longest free run of each region, slab by slab; zero for closed regions.
    runs: MaxTree,
    taken: u64,
}

impl Allocator {
    /// Creates it without slabs; each will have `slab_units`.
    pub(super) fn new(slab_units: u32) -> Self {
        Self { slabs: Vec::new(), slab_units, runs: MaxTree::new(1), taken: 0 }
    }

    /// Units in a slab.
    pub(super) fn slab_units(&self) -> u32 {
        self.slab_units
    }

    /// Units in all slabs.
    pub(super) fn total(&self) -> u64 {
        self.count() as u64 * u64::from(self.slab_units)
    }

    /// Units taken.
    pub(super) fn taken(&self) -> u64 {
        self.taken
    }

    /// Number of slabs.
    pub(super) fn count(&self) -> usize {
        self.slabs.iter().flatten().count()
    }

    /// Slab of a place.
    pub(super) fn slab_of(&self, place: u32) -> usize {
        (place / self.slab_units) as usize
    }

    /// The places in a slab.
    pub(super) fn places_of(&self, slab: usize) -> Range<u32> {
        let start = number(slab) * self.slab_units;
        start..start + self.slab_units
    }

    /// First unused slab number.
    pub(super) fn vacant_number(&self) -> usize {
        self.slabs.iter().position(Option::is_none).unwrap_or(self.slabs.len())
    }

    /// Upper bound of slab numbers, exclusive.
    pub(super) fn numbers(&self) -> usize {
        self.slabs.len()
    }

    /// True if there is a slab of this number.
    pub(super) fn has(&self, slab: usize) -> bool {
        self.slabs.get(slab).is_some_and(Option::is_some)
    }

    /// Adds a free slab. False if its units cannot be numbered in 32 bits.
    pub(super) fn add(&mut self, slab: usize) -> bool {
        if (slab as u64 + 1) * u64::from(self.slab_units) > u64::from(u32::MAX) {
            return false;
        }
        if slab >= self.slabs.len() {
            self.slabs.resize(slab + 1, None);
            self.runs.grow(self.slabs.len() * self.slab_regions());
        }
        let len = |region: usize| (self.slab_units - number(region) * REGION_UNITS).min(REGION_UNITS);
        let fresh = |at| Region { bits: Bits::new(len(at)), open: true };
        let regions = (0..self.slab_regions()).map(fresh).collect();
        self.slabs[slab] = Some(Slab { regions, taken: 0 });
        let places = self.places_of(slab);
        self.set_open(&places, true);
        true
    }

    /// Removes a slab with all its units.
    pub(super) fn drop_slab(&mut self, slab: usize) {
        let places = self.places_of(slab);
        self.set_open(&places, false);
        if let Some(gone) = self.slabs.get_mut(slab).and_then(Option::take) {
            self.taken -= u64::from(gone.taken);
        }
    }

    /// Opens or closes the regions of these places, which are in one slab.
    pub(super) fn set_open(&mut self, places: &Range<u32>, open: bool) {
        let (number, first) = (self.slab_of(places.start), self.slab_of(places.start) * self.slab_regions());
        let region = |place: u32| (place % self.slab_units / REGION_UNITS) as usize;
        let touched = region(places.start)..=region(places.end - 1);
        let Some(slab) = self.slabs.get_mut(number).and_then(Option::as_mut) else { return };
        for at in touched {
            slab.regions[at].open = open;
            self.runs.set(first + at, slab.regions[at].run());
        }
    }

    /// Units taken in a slab.
    pub(super) fn taken_in(&self, slab: usize) -> u32 {
        self.slabs.get(slab).and_then(Option::as_ref).map_or(0, |slab| slab.taken)
    }

    /// Slab with the fewest used units.
    pub(super) fn emptiest_slab(&self) -> Option<usize> {
        let there = self.slabs.iter().enumerate().filter_map(|(at, slab)| Some((at, slab.as_ref()?.taken)));
        there.min_by_key(|(_, taken)| *taken).map(|(at, _)| at)
    }

    /// Places of the open region with the most free units.
    pub(super) fn emptiest_region(&self) -> Option<Range<u32>> {
        let there = self.slabs.iter().enumerate().filter_map(|(slab, there)| Some((slab, there.as_ref()?)));
        let regions =
            there.flat_map(|(slab, there)| there.regions.iter().enumerate().map(move |(at, it)| (slab, at, it)));
        let (slab, at, found) =
            regions.filter(|(_, _, region)| region.open).max_by_key(|(_, _, region)| region.bits.free())?;
        let start = self.places_of(slab).start + number(at) * REGION_UNITS;
        Some(start..start + found.bits.units())
    }

    /// Takes the first run of `n` free units.
    pub(super) fn take(&mut self, n: u16) -> Option<u32> {
        loop {
            let region = self.runs.first(u32::from(n))?;
            let (slab, at) = (region / self.slab_regions(), region % self.slab_regions());
            let start = self.places_of(slab).start + number(at) * REGION_UNITS;
            let slab = self.slabs[slab].as_mut()?;
            let found = slab.regions[at].bits.take(u32::from(n));
            if let Some(unit) = found {
                slab.taken += u32::from(n);
                self.taken += u64::from(n);
                return Some(start + unit);
            }
            // The bound was too high; the failed search has made it exact.
            self.runs.set(region, slab.regions[at].run());
        }
    }

    /// Takes exactly these units; false if one is used, or does not exist.
    pub(super) fn mark(&mut self, place: u32, n: u16) -> bool {
        let marked = self.region(place).is_some_and(|(_, slab, at, unit)| {
            let marked = slab.regions[at].bits.mark(unit, u32::from(n));
            slab.taken += if marked { u32::from(n) } else { 0 };
            marked
        });
        self.taken += if marked { u64::from(n) } else { 0 };
        marked
    }

    /// Frees units.
    pub(super) fn give(&mut self, place: u32, n: u16) {
        let Some((region, slab, at, unit)) = self.region(place) else { return };
        slab.regions[at].bits.give(unit, u32::from(n));
        slab.taken -= u32::from(n);
        let run = slab.regions[at].run();
        self.runs.set(region, run);
        self.taken -= u64::from(n);
    }

    /// Region of a place: its global number, its slab, its number there, and the unit in it.
    fn region(&mut self, place: u32) -> Option<(usize, &mut Slab, usize, u32)> {
        let (slab, unit) = (self.slab_of(place), place % self.slab_units);
        let at = (unit / REGION_UNITS) as usize;
        let region = slab * self.slab_regions() + at;
        Some((region, self.slabs.get_mut(slab)?.as_mut()?, at, unit % REGION_UNITS))
    }

    /// Regions in a slab.
    fn slab_regions(&self) -> usize {
        self.slab_units.div_ceil(REGION_UNITS) as usize
    }
}

/// Numbers of slabs and regions are less than those of units, which are 32 bits wide.
fn number(at: usize) -> u32 {
    u32::try_from(at).unwrap_or(u32::MAX)
}
