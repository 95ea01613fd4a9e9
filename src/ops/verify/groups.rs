//! Groups of packs whose footers are in memory together.

/// Maximum packs of a group.
const PACKS_MAX: usize = 64;
/// Approximate bytes of memory of a chunk in a footer.
const CHUNK_WEIGHT: u64 = 64;

/// `packs` in groups, in their order. Footers of a group take at most a quarter of `memory`, by the number of `chunks` of each; a larger
/// one is alone.
pub(super) fn grouped<T>(packs: &[T], memory: u64, chunks: impl Fn(&T) -> u32) -> Vec<&[T]> {
    let most = memory / 4 / CHUNK_WEIGHT;
    let (mut groups, mut rest) = (Vec::new(), packs);
    while !rest.is_empty() {
        let mut sum = 0;
        let fit = rest.iter().take(PACKS_MAX).take_while(|pack| {
            sum += u64::from(chunks(pack));
            sum <= most
        });
        let (group, after) = rest.split_at(fit.count().max(1));
        groups.push(group);
        rest = after;
    }
    groups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_are_within_the_memory_and_have_every_pack_once() {
        let memory = 4 * CHUNK_WEIGHT * 100;
        let lens =
            |packs: &[u32]| grouped(packs, memory, |&chunks| chunks).into_iter().map(<[_]>::len).collect::<Vec<_>>();
        assert_eq!(lens(&[]), [0; 0]);
        assert_eq!(lens(&[40, 60, 1, 99, 100]), [2, 2, 1]);
        assert_eq!(lens(&[1, 500, 1]), [1, 1, 1], "one that is too large is alone");
        assert_eq!(lens(&[0; 130]), [64, 64, 2]);
    }
}
