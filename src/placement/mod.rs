//! Placement: where data is cheap to have. Pure: sites, links and prices in, answers out.
//!
//! ```text
//! price book + sites file -> sites and links, checked against the signed policy
//! trees of the inputs -> closure    + inventories -> what each site holds of it
//! closure + holdings + sites and links + policy + request -> hint
//! ```

mod calibration;
mod closure;
mod dollars;
mod hint;
mod holdings;
mod objective;
mod price;
mod price_book;
mod request;
mod site_links;
mod sites;
mod sources;
#[cfg(test)]
mod tests;
mod usage;
mod verdict;

pub use self::calibration::{LinkCalibration, calibration};
pub use self::closure::{ChunkBits, Closure, ClosureBuilder, Found};
pub use self::hint::{
    AtRisk, Candidate, CandidateBytes, CandidateCapacity, CandidateDollars, CandidateTime, Hint, Input, Snapshot,
    check_hint_id, hint,
};
pub use self::holdings::{AgentChunks, Holding, Holdings};
pub use self::objective::{Mode, Objective};
pub use self::price::{BadTiers, MICRO, Price, Tier, Unit};
pub use self::price_book::{EgressPrice, PriceBook, StoragePrice};
pub use self::request::{
    API_VERSION, CANDIDATES_MAX, HintCandidate, HintInput, HintOutput, HintRequest, INPUTS_MAX, Workload,
};
pub use self::sites::{Gpus, Link, LinkCost, SITES_LEN_MAX, SITES_SCHEMA, Site, Sites};
pub use self::sources::{SourceShare, TimeBasis};
pub use self::usage::{PricedSites, Usage, UsageBy, UsageRow};
pub use self::verdict::{Denial, HintVerdict};
