//! A cluster of Kubernetes for controllers: a stand-in for its API server, and agents that may read open data by a policy.

use std::thread::sleep;
use std::time::{Duration, Instant};

use super::hints::fixture;
use super::{PATIENCE, Running};
use crate::kubernetes::ApiServer;
use crate::policy::PolicyFixture;

/// A cluster at the site `cloud`, and the repository at `home`.
pub(super) struct Cluster {
    pub(super) lab: PolicyFixture,
    pub(super) api: ApiServer,
}

impl Cluster {
    /// A cluster whose API server permits what `rules` say: those of the chart.
    pub(super) fn new(rules: &'static str) -> Self {
        let mut lab = fixture();
        // The policy knows the service accounts of the cluster as an agent that may read everything.
        let account = "[[spiffe]]\nid = 'spiffe://cloud/ns/ml/**'\nagent = 'home/trainer'\n\n";
        lab.rules = format!("{account}{}", lab.rules);
        lab.set(&[]);
        lab.user.ok(&["identity", "issue", "cloud/api", "--to", "api", "--dns", "localhost"]);
        let work = lab.user.work();
        let api = ApiServer::start(&work.join("api"), rules);
        api.write_kubeconfig(&work.join("kubeconfig"), &work.join("api/ca.crt"), None);
        Self { lab, api }
    }

    /// An agent of the cluster: advisor, cache and, by `sections` of its settings, controller.
    pub(super) fn agent(&self, file: &str, agent: &str, sections: &str) -> Running {
        let folder = file.trim_end_matches(".toml");
        if !self.lab.user.work().join(folder).exists() {
            self.lab.user.ok(&["identity", "issue", agent, "--to", folder]);
        }
        let settings = format!(
            "repository = '../repo'\nsocket = '{folder}-run/agent.sock'\nmemory = '256M'\nidentity = '{folder}'\ngrace = '5s'\n\
             [cache]\ndir = '{folder}-cache'\ncapacity = '64M'\nfree_floor = '0'\ninventory = '100ms'\n\
             [advisor]\nsites = 'sites.toml'\n{sections}"
        );
        self.lab.user.write(file, settings.as_bytes());
        Running::from_file(&self.lab.user, file)
    }

    /// Ends the test: nothing was asked that a server would not understand, or that the chart does not permit.
    pub(super) fn fine(self, agents: Vec<Running>) {
        agents.into_iter().for_each(Running::stop);
        assert_eq!(self.api.wrong(), [""; 0]);
    }

    /// Notes of the events with a reason, once there is one.
    pub(super) fn events(&self, reason: &str) -> Vec<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let events = self.api.all("events");
            let of = events.iter().filter(|event| event["reason"] == reason);
            let notes: Vec<String> = of.map(|event| event["note"].as_str().unwrap().to_owned()).collect();
            if !notes.is_empty() {
                return notes;
            }
            assert!(Instant::now() < end, "no event {reason}");
            sleep(Duration::from_millis(20));
        }
    }
}
