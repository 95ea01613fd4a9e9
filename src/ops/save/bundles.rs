//! Bundles of a save: finds the tensors that an optimizer changes together, weights and their moments, by names and shapes. A wrong
//! pair costs no more than time: what is predicted from it is stored in another way.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::sync::Arc;

use super::contents::is_chunk;
use super::detect::Formats;
use super::source::open;
use crate::checkpoint::{Dtype, Layout, Tensor};
use crate::chunker::tensor;
use crate::codec::BUNDLE_LEN_MAX;
use crate::error::Result;
use crate::tree::Walk;

/// Names of the first moments: of Adam and Lion, and of SGD.
const FIRST_MOMENTS: [&str; 2] = ["exp_avg", "momentum_buffer"];
/// Name of the second moments.
const SECOND_MOMENTS: &str = "exp_avg_sq";
/// Minimum length of a tensor; shorter ones share chunks.
const LEN_MIN: u64 = tensor::SMALL_LEN;
/// Segments at the start of a name that may differ between the weights and their moments.
const PREFIX_MAX: usize = 4;

/// File and start of a tensor.
type TensorStart = (usize, u64);

/// Tensors that an optimizer changes together.
#[derive(Debug, Default)]
pub(super) struct Bundles {
    /// Tensors of each bundle: weights, first moments and, for Adam, second moments.
    sets: Vec<Vec<TensorStart>>,
    /// Bundle of each tensor.
    members: HashMap<TensorStart, usize>,
    /// Boundaries of the files.
    cuts: HashMap<usize, Vec<u64>>,
}

/// Chunks that make a bundle, in its order.
pub(super) type Pieces = Vec<(usize, Range<u64>)>;

impl Bundles {
    /// Finds the bundles among the tensors of `layouts`. Blocking.
    ///
    /// # Errors
    /// A file cannot be read.
    pub(super) fn find(walk: &Walk, formats: &Formats, layouts: &BTreeMap<usize, Arc<Layout>>) -> Result<Self> {
        let mut bundles = Self::default();
        for same_shape in SameShape::all(layouts) {
            for set in same_shape.sets() {
                let at = bundles.sets.len();
                bundles.members.extend(set.iter().map(|spot| (*spot, at)));
                bundles.sets.push(set);
            }
        }
        let files: HashSet<usize> = bundles.members.keys().map(|(file, _)| *file).collect();
        for file in files {
            let (Some(found), Some(layout)) = (walk.found.get(file), layouts.get(&file)) else { continue };
            if let Some(cuts) = formats.cuts(layout, &open(walk, found)?, found)? {
                bundles.cuts.insert(file, cuts);
            }
        }
        Ok(bundles)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.sets.is_empty()
    }

    /// Chunks that make a bundle with the one in `range` of a file, which is that `tensor`'s or a piece of it.
    pub(super) fn pieces(&self, file: usize, tensor: &Tensor, range: &Range<u64>) -> Option<Pieces> {
        let set = self.sets.get(*self.members.get(&(file, tensor.start))?)?;
        let (offset, len) = (range.start - tensor.start, range.end - range.start);
        let pieces: Pieces = set.iter().map(|&(file, start)| (file, start + offset..start + offset + len)).collect();
        let fits = len.is_multiple_of(4) && len * set.len() as u64 <= BUNDLE_LEN_MAX;
        let are_chunks = pieces.iter().all(|(file, range)| is_chunk(&self.cuts, *file, range));
        (fits && are_chunks).then_some(pieces)
    }
}

/// Tensors of 32-bit floats of one shape, in the order of the files.
#[derive(Default)]
struct SameShape<'a> {
    weights: Vec<(&'a str, TensorStart)>,
    first: Vec<(String, TensorStart)>,
    /// Second moments by the name of what they belong to, of which several files may have some.
    second: HashMap<String, Vec<TensorStart>>,
}

impl<'a> SameShape<'a> {
    fn all(layouts: &'a BTreeMap<usize, Arc<Layout>>) -> Vec<Self> {
        let mut classes: BTreeMap<(&[u64], u64), Self> = BTreeMap::new();
        for (&file, layout) in layouts {
            // Tied weights have several names, and lie at one place.
            let mut last = None;
            for tensor in layout.tensors.iter().filter(|tensor| tensor.dtype == Dtype::F32) {
                let len = tensor.end - tensor.start;
                if len < LEN_MIN || last.replace(tensor.start) == Some(tensor.start) {
                    continue;
                }
                let class = classes.entry((&tensor.shape, len)).or_default();
                let spot = (file, tensor.start);
                match (without_segment(&tensor.name, &FIRST_MOMENTS), without_segment(&tensor.name, &[SECOND_MOMENTS]))
                {
                    (Some(of), _) => class.first.push((of, spot)),
                    (_, Some(of)) => class.second.entry(of).or_default().push(spot),
                    _ => class.weights.push((&tensor.name, spot)),
                }
            }
        }
        classes.into_values().collect()
    }

    /// Tensors of each bundle: first moments with their weights, by name, or by order if there are as many of both.
    fn sets(self) -> Vec<Vec<TensorStart>> {
        let Self { weights, first, second } = self;
        let mut named: HashMap<(Option<usize>, &str), Option<TensorStart>> = HashMap::new();
        for (name, spot) in &weights {
            for suffix in suffixes(name) {
                for file in [Some(spot.0), None] {
                    named.entry((file, suffix)).and_modify(|known| *known = None).or_insert(Some(*spot));
                }
            }
        }
        let in_order = first.len() == weights.len();
        let (mut taken, mut met, mut sets) = (HashSet::new(), HashMap::<&str, usize>::new(), Vec::new());
        for (at, (of, moments)) in first.iter().enumerate() {
            let nth = met.entry(of).or_default();
            let second = second.get(of).and_then(|spots| spots.get(*nth)).copied();
            *nth += 1;
            // Several files may have weights of a name: prefers those of the moments' own file.
            let by_name = [Some(moments.0), None]
                .into_iter()
                .find_map(|file| suffixes(of).find_map(|suffix| named.get(&(file, suffix)).copied().flatten()));
            let by_order = || weights.get(at).filter(|_| in_order).map(|(_, spot)| *spot);
            let Some(weights) = by_name.or_else(by_order).filter(|spot| taken.insert(*spot)) else { continue };
            sets.push([weights, *moments].into_iter().chain(second).collect());
        }
        sets
    }
}

/// `name` without the segment that is one of `words`; none if it has no such segment.
fn without_segment(name: &str, words: &[&str]) -> Option<String> {
    let segments: Vec<&str> = name.split(SEPARATORS).collect();
    segments.iter().any(|segment| words.contains(segment)).then(|| {
        let others = segments.into_iter().filter(|segment| !words.contains(segment));
        others.collect::<Vec<_>>().join(".")
    })
}

const SEPARATORS: [char; 2] = ['.', '/'];

/// `name`, and what is left of it without its first segments. A number alone names nothing: it counts parameters.
fn suffixes(name: &str) -> impl Iterator<Item = &str> {
    fn shorter<'n>(name: &&'n str) -> Option<&'n str> {
        Some(name.split_once(SEPARATORS)?.1)
    }
    let is_name = |name: &&str| name.rsplit(SEPARATORS).next().is_some_and(|last| last.parse::<u64>().is_err());
    std::iter::successors(Some(name), shorter).take(1 + PREFIX_MAX).filter(is_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_are_found_by_name_or_by_order() {
        let spot = |at: u64| (0, at);
        let class = |weights: &[&'static str], first: &[&str], second: &[&str]| {
            let weights: Vec<_> = weights.iter().copied().zip((0..).map(spot)).collect();
            let first =
                first.iter().map(|name| without_segment(name, &FIRST_MOMENTS).unwrap()).zip((10..).map(spot)).collect();
            let mut of_name = HashMap::<String, Vec<TensorStart>>::new();
            for (name, spot) in second.iter().zip((20..).map(spot)) {
                of_name.entry(without_segment(name, &[SECOND_MOMENTS]).unwrap()).or_default().push(spot);
            }
            let second = of_name;
            SameShape { weights, first, second }.sets()
        };
        let by_order = class(
            &["model.a.weight", "model.b.weight"],
            &["optimizer.state.0.exp_avg", "optimizer.state.1.exp_avg"],
            &["optimizer.state.0.exp_avg_sq", "optimizer.state.1.exp_avg_sq"],
        );
        assert_eq!(by_order, [[spot(0), spot(10), spot(20)], [spot(1), spot(11), spot(21)]]);
        let by_name = class(&["model.a.weight", "model.b.weight"], &["exp_avg.b.weight", "exp_avg.a.weight"], &[]);
        assert_eq!(by_name, [[spot(1), spot(10)], [spot(0), spot(11)]]);
        let beside = class(&["ema.a.w", "model.a.w"], &["optim.state.model.a.w.exp_avg"], &[]);
        assert_eq!(beside, [[spot(1), spot(10)]]);
        // Parts of one tensor: the first with the first.
        let parts = class(&["w", "w"], &["w.exp_avg", "w.exp_avg"], &["w.exp_avg_sq", "w.exp_avg_sq"]);
        assert_eq!(parts, [[spot(0), spot(10), spot(20)], [spot(1), spot(11), spot(21)]]);
        // Neither a name nor the number of them tells.
        assert!(class(&["ema.a.w", "model.a.w"], &["state.0.exp_avg"], &[]).is_empty());
        assert!(class(&["ema.a.w", "model.a.w"], &["exp_avg.a.w"], &[]).is_empty());
    }

    #[test]
    fn names_have_segments() {
        assert_eq!(without_segment("optimizer/state/3/momentum_buffer", &FIRST_MOMENTS).unwrap(), "optimizer.state.3");
        assert_eq!(without_segment("exp_avg_sq.h.0.weight", &[SECOND_MOMENTS]).unwrap(), "h.0.weight");
        assert!(without_segment("my_exp_avg.weight", &FIRST_MOMENTS).is_none());
        assert_eq!(suffixes("a.b.weight").collect::<Vec<_>>(), ["a.b.weight", "b.weight", "weight"]);
        assert_eq!(suffixes("optimizer.state.0").count(), 0);
    }
}
