//! Sites and links as an epoch has them, for people.

use super::{Epoch, HintDetail};
use crate::agent::view::{Gpus, Site, SiteAgent, SiteLink, SiteList};
use crate::placement;
use crate::repository::Repository;
use crate::transfer::inventories::Counted;

/// Bytes of a GB, for which prices are told.
const GB: u64 = 1_000_000_000;

impl Epoch {
    /// Sites of the sites file, with the agents whose inventories are known, and the links between them.
    #[must_use]
    pub fn site_list(&self, repository: &Repository, detail: HintDetail) -> SiteList {
        let place = [repository.store().location().to_string(), repository.id().to_string()];
        let (sites, own) = (&self.sites.sites, self.sites.sites.site_of(&place));
        let site = |(name, site): (&str, &placement::Site)| Site {
            name: name.to_owned(),
            provider: site.provider.clone(),
            region: site.region.clone(),
            jurisdictions: self.jurisdictions(name),
            has_repository: own == Some(name),
            gpus: site.gpus.iter().map(gpus).collect(),
            agents: self.agents_at(name),
        };
        let link = |link: &placement::Link| SiteLink {
            from: link.from.clone(),
            to: link.to.clone(),
            path: link.path.clone(),
            rate: link.rate,
            delay_ms: link.delay.map(|delay| delay.as_secs_f64() * 1000.0),
            usd_micro_gb: link.cost.marginal(|meter| self.month.volumes.get(meter).copied().unwrap_or(0), GB),
        };
        SiteList {
            generated_at: self.at.to_string(),
            sites: sites.sites().map(site).collect(),
            links: sites.links().iter().map(link).collect(),
            measured: self.calibration(),
            notes: self.notes(detail),
        }
    }

    fn jurisdictions(&self, site: &str) -> Vec<String> {
        let rule = self.policy.as_ref().and_then(|policy| policy.site(site));
        rule.map(|rule| rule.jurisdictions.iter().cloned().collect()).unwrap_or_default()
    }

    fn agents_at(&self, site: &str) -> Vec<SiteAgent> {
        let usable = self.inventories.iter().map(|counted| agent(counted, false));
        let all = usable.chain(self.false_inventories.iter().map(|counted| agent(counted, true)));
        let mut agents: Vec<SiteAgent> =
            all.filter(|agent| agent.agent.split_once('/').is_some_and(|(of, _)| of == site)).collect();
        agents.sort_by(|one, other| one.agent.cmp(&other.agent));
        agents
    }
}

fn gpus(gpus: &placement::Gpus) -> Gpus {
    Gpus { model: gpus.model.clone(), count: gpus.count, usd_micro_hour: gpus.micro_usd_hour }
}

fn agent(counted: &Counted, is_false: bool) -> SiteAgent {
    SiteAgent {
        agent: counted.agent.path(),
        at: counted.at.to_string(),
        capacity: counted.space.capacity,
        used: counted.space.used,
        promised: counted.space.promised,
        chunks: counted.held.len(),
        is_false,
    }
}
