//! Measured links to a site: of what its agents tell about a link, the median.

use std::collections::BTreeMap;

use crate::format::LinkRate;

/// Measurements of an agent that count. More do not make it more credible: whoever has measured a link twice is never left out for one
/// that tells of very many.
const SAMPLES_MAX: u32 = 8;
/// An agent counts if it has this part of the measurements of the one with the most.
const SAMPLES_PART: u32 = 4;
/// Largest spread that is believed, in hundredths.
const SPREAD_MAX: u32 = 10_000;
/// Longest overhead that is believed, in milliseconds.
const OVERHEAD_MAX: u32 = 600_000;

/// Links to a site, by where they come from; empty for the repository.
#[derive(Debug, Default)]
pub(super) struct SiteLinks<'a>(BTreeMap<&'a str, Vec<&'a LinkRate>>);

impl<'a> SiteLinks<'a> {
    /// Adds what an agent of the site has measured.
    pub(super) fn add(&mut self, links: &'a [LinkRate]) {
        for link in links {
            self.0.entry(&link.site).or_default().push(link);
        }
    }

    /// Of each link, the median by rate of the agents that have measured it enough; of two, the slower one. So one agent that tells
    /// something absurd changes little where two others have measured the link twice.
    pub(super) fn medians(self) -> impl Iterator<Item = LinkRate> {
        self.0.into_values().filter_map(|links| median(&links))
    }
}

fn median(links: &[&LinkRate]) -> Option<LinkRate> {
    let counted = |link: &LinkRate| link.samples.min(SAMPLES_MAX);
    let most = links.iter().map(|link| counted(link)).max()?;
    let mut enough: Vec<&LinkRate> =
        links.iter().copied().filter(|link| counted(link) >= most / SAMPLES_PART).collect();
    // Ties are broken, so that the order of agents does not matter.
    enough.sort_by_key(|link| (link.rate, link.samples, link.spread, link.overhead_ms, link.outcomes, link.error));
    let link = *enough.get((enough.len() - 1) / 2)?;
    Some(LinkRate {
        site: link.site.clone(),
        spread: link.spread.min(SPREAD_MAX),
        overhead_ms: link.overhead_ms.min(OVERHEAD_MAX),
        covered: link.covered.min(link.outcomes),
        ..*link
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(rate: u64, samples: u32) -> LinkRate {
        LinkRate { site: "east".to_owned(), rate, spread: 150, samples, ..LinkRate::default() }
    }

    fn median_of(links: &[LinkRate]) -> LinkRate {
        let mut site = SiteLinks::default();
        // Each is of another agent.
        links.iter().for_each(|link| site.add(std::slice::from_ref(link)));
        site.medians().next().unwrap()
    }

    #[test]
    fn one_of_three_agents_cannot_change_a_link() {
        let honest = [link(90, 12), link(100, 40), link(110, 200)];
        assert_eq!(median_of(&honest).rate, 100);
        let liar = LinkRate { spread: u32::MAX, overhead_ms: u32::MAX, ..link(1, u32::MAX) };
        let joined = median_of(&[liar.clone(), link(90, 2), link(100, 3)]);
        assert_eq!((joined.rate, joined.spread), (90, 150));
        let alone = median_of(&[LinkRate { covered: 9, outcomes: 3, ..liar }]);
        assert_eq!((alone.spread, alone.overhead_ms, alone.covered), (SPREAD_MAX, OVERHEAD_MAX, 3));
    }

    #[test]
    fn agents_with_few_measurements_count_only_where_nobody_has_more() {
        assert_eq!(median_of(&[link(1, 1), link(2, 1), link(100, 64)]).rate, 100);
        assert_eq!(median_of(&[link(1, 1), link(2, 1), link(100, 1)]).rate, 2);
        assert_eq!(median_of(&[link(7, 3), link(5, 3)]).rate, 5);
    }
}
