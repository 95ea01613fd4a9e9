//! Levels: scores from 0 to 100, in the eleven steps that a scheduler knows
//! (<https://github.com/kubernetes/kube-scheduler/blob/e87dbdd/extender/v1/types.go>, `MaxExtenderPriority`).

/// Highest level.
const MAX: u64 = 10;

/// Level of each score: a tenth of it, rounded; but what differs gets different levels, the highest first, as long as there are any.
pub(super) fn levels(scores: &[u64]) -> Vec<u64> {
    let mut distinct = scores.to_vec();
    distinct.sort_unstable_by(|a, b| b.cmp(a));
    distinct.dedup();
    let mut given: Vec<u64> = Vec::with_capacity(distinct.len());
    for (at, score) in distinct.iter().enumerate() {
        let own = (score + 5) / 10;
        // Leaves a level for each lower score.
        let needed = u64::try_from(distinct.len() - at - 1).unwrap_or(MAX).min(MAX);
        let highest = given.last().map_or(MAX, |above| above.saturating_sub(1));
        given.push(own.max(needed).min(highest));
    }
    let level = |score: &u64| distinct.iter().position(|other| other == score).and_then(|at| given.get(at)).copied();
    scores.iter().map(|score| level(score).unwrap_or(0)).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_differs_gets_different_levels() {
        assert_eq!(levels(&[100, 50, 0]), [10, 5, 0]);
        assert_eq!(levels(&[100, 99, 98]), [10, 9, 8]);
        assert_eq!(levels(&[2, 1, 0, 1]), [2, 1, 0, 1]);
        assert_eq!(levels(&[7, 7]), [1, 1]);
        assert_eq!(levels(&[]), [0_u64; 0]);
    }

    proptest! {
        #[test]
        fn levels_keep_order_and_ties(scores in proptest::collection::vec(0_u64..=100, 0..40)) {
            let (levels, mut distinct) = (levels(&scores), scores.clone());
            distinct.sort_unstable();
            distinct.dedup();
            for (a, of_a) in scores.iter().zip(&levels) {
                prop_assert!(*of_a <= MAX);
                for (b, of_b) in scores.iter().zip(&levels) {
                    prop_assert!(a != b || of_a == of_b);
                    prop_assert!(a <= b || of_a >= of_b);
                    prop_assert!(a <= b || of_a > of_b || distinct.len() > 11);
                }
            }
        }
    }
}
