//! Calibration: how well hints have predicted the time of transfers, for each link.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::site_links::SiteLinks;
use crate::format::{Inventory, LinkRate};

/// Measurements of a link, and the outcomes of predictions from them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "agent", derive(utoipa::ToSchema))]
pub struct LinkCalibration {
    /// Site that bytes come from; none: the repository.
    pub from: Option<String>,
    /// Site that they come to.
    pub to: String,
    /// Bytes a second, at the median, as hints use it.
    pub rate: u64,
    /// The 90th percentile of a time over its median, as hints use it.
    pub spread: f64,
    /// Measurements.
    pub samples: u32,
    /// Seconds that a transfer takes beside the time of its bytes; none: not known.
    pub overhead_s: Option<f64>,
    /// Transfers whose time was compared to the prediction: the last 64.
    pub outcomes: u32,
    /// Median of the relative errors of the predicted medians; none without outcomes.
    pub median_error: Option<f64>,
    /// Share of the transfers that took at most the predicted 90th percentile; none without outcomes.
    pub p90_coverage: Option<f64>,
}

/// Measured links of the sites, by their ends, as hints use them.
pub fn calibration<'a>(inventories: impl IntoIterator<Item = &'a Inventory>) -> Vec<LinkCalibration> {
    let mut sites: BTreeMap<&str, SiteLinks<'_>> = BTreeMap::new();
    for inventory in inventories {
        sites.entry(inventory.agent.site()).or_default().add(&inventory.links);
    }
    let mut links: Vec<(LinkRate, &str)> =
        sites.into_iter().flat_map(|(to, links)| links.medians().map(move |link| (link, to))).collect();
    links.sort_by(|(one, one_to), (other, other_to)| (&one.site, one_to).cmp(&(&other.site, other_to)));
    let shown = |(link, to): (LinkRate, &str)| {
        let outcomes = Some(f64::from(link.outcomes)).filter(|outcomes| *outcomes > 0.0);
        LinkCalibration {
            from: Some(link.site.clone()).filter(|from| !from.is_empty()),
            to: to.to_owned(),
            rate: link.rate,
            spread: f64::from(link.spread) / 100.0,
            samples: link.samples,
            overhead_s: Some(f64::from(link.overhead_ms) / 1000.0).filter(|overhead| *overhead > 0.0),
            outcomes: link.outcomes,
            median_error: outcomes.map(|_| f64::from(link.error) / 1000.0),
            p90_coverage: outcomes.map(|outcomes| f64::from(link.covered) / outcomes),
        }
    };
    links.into_iter().map(shown).collect()
}
