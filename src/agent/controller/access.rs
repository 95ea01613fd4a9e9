//! Settings that controllers share: the API server, the election, warms, and rights.

use std::path::{Path, PathBuf};
use std::time::Duration;

use kube::config::{KubeConfigOptions, Kubeconfig};

use crate::agent::pods::AccountRule;
use crate::error::{Error, Result};
use crate::identity::Identity;

/// Access of a controller to its cluster, and to agents.
#[derive(Clone, Debug)]
pub struct ClusterAccess {
    /// Kubeconfig file; none: the service account of this pod.
    pub kubeconfig: Option<PathBuf>,
    /// Namespace of the lease by which one of several controllers is elected; none: the one of this pod or of the kubeconfig.
    pub namespace: Option<String>,
    /// Time without a renewal after which another controller takes over.
    pub lease: Duration,
    /// Agents that fetch and hold what pods wait for; at a site without any, one of its agents is chosen.
    pub holders: Vec<Identity>,
    /// Warms under way at a time.
    pub warms: usize,
    /// Sets of names that are held at a time.
    pub held_names: usize,
    /// Trust domain of the SPIFFE ids of service accounts; the site of the agent if there is none.
    pub trust_domain: Option<String>,
    /// Names that pods may wait for, by their service accounts.
    pub allow: Vec<AccountRule>,
}

impl ClusterAccess {
    /// Client of the API server, and the default namespace. `section` is the one of the settings.
    ///
    /// # Errors
    /// Usage or not found, for a kubeconfig that cannot be used, or if this is no pod of a cluster.
    pub(super) async fn connect(&self, section: &str) -> Result<(kube::Client, String)> {
        let mut config = match &self.kubeconfig {
            Some(path) => connection_by_file(section, path).await?,
            None => kube::Config::incluster().map_err(|source| {
                let what = "this is no pod of a cluster, or it has no token of its service account";
                Error::not_found(format!("[{section}] {what}"))
                    .help("set automountServiceAccountToken, or `kubeconfig` outside of a cluster")
                    .source(source)
            })?,
        };
        // Passes repeat what failed, and tell of it meanwhile.
        config.default_retry = false;
        let namespace = config.default_namespace.clone();
        let client = kube::Client::try_from(config)
            .map_err(|source| Error::usage("cannot use the settings of the API server").source(source))?;
        Ok((client, namespace))
    }
}

async fn connection_by_file(section: &str, path: &Path) -> Result<kube::Config> {
    let unusable = || Error::usage(format!("[{section}] kubeconfig cannot be used")).at(path.display());
    let file = Kubeconfig::read_from(path).map_err(|source| unusable().source(source))?;
    let config = kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
        .await
        .map_err(|source| unusable().source(source))?;
    if config.cluster_url.scheme_str() != Some("https") {
        return Err(unusable().expected("https").got(&config.cluster_url));
    }
    Ok(config)
}
