//! Service accounts: what their pods may name, by the rules of an agent and the policy of the repository.

use std::collections::BTreeSet;

use tokio::time::{Duration, Instant};

use super::annotations::PodNames;
use crate::agent::state::AgentState;
use crate::error::{Error, ErrorKind, Result};
use crate::identity::Identity;
use crate::name::Name;
use crate::pattern::Patterns;
use crate::selector::Selector;
use crate::transfer::exchange::NameView;

/// Age of what is known of the repository, at most, unless a name is lacking.
const FRESH: Duration = Duration::from_secs(1);

/// Names that some service accounts may restore, stage, warm and save.
#[derive(Clone, Debug)]
pub struct AccountRule {
    /// Namespaces.
    pub namespaces: Patterns,
    /// Service accounts in these.
    pub accounts: Patterns,
    /// Names.
    pub names: Patterns,
}

/// Rights of service accounts.
#[derive(Clone, Debug)]
pub(in crate::agent) struct AccountRights {
    /// Names by namespace and account.
    pub(in crate::agent) rules: Vec<AccountRule>,
    /// Trust domain of their SPIFFE ids, by which the policy knows them.
    pub(in crate::agent) trust_domain: String,
}

/// A service account.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(in crate::agent) struct ServiceAccount {
    pub(in crate::agent) namespace: String,
    pub(in crate::agent) name: String,
}

/// Names that a pod reads, each resolved, and remarks for its creator on those that are not there.
#[derive(Debug, Default)]
pub(in crate::agent) struct ResolvedNames {
    pub(in crate::agent) names: Vec<Name>,
    pub(in crate::agent) warnings: Vec<String>,
    /// One of the names that the policy does not let come to this agent.
    pub(in crate::agent) denied_here: Option<Name>,
}

impl ServiceAccount {
    /// SPIFFE id, as Istio and others write it
    /// (<https://istio.io/latest/docs/concepts/security/#istio-identity>).
    ///
    /// # Errors
    /// Usage, if a part is malformed.
    pub(in crate::agent) fn identity(&self, trust_domain: &str) -> Result<Identity> {
        Identity::spiffe(&format!("spiffe://{trust_domain}/ns/{}/sa/{}", self.namespace, self.name))
    }

    fn text(&self) -> String {
        format!("service account {}/{}", self.namespace, self.name)
    }

    /// Reads the name of the user that it is for the API server
    /// (<https://kubernetes.io/docs/reference/access-authn-authz/authentication/#service-account-tokens>).
    ///
    /// # Errors
    /// Denied, for another user.
    pub(in crate::agent) fn of_user(user: &str) -> Result<Self> {
        let rest = user.strip_prefix("system:serviceaccount:").and_then(|rest| rest.split_once(':'));
        let (namespace, name) = rest
            .filter(|(namespace, name)| !namespace.is_empty() && !name.is_empty())
            .ok_or_else(|| Error::denied("token is not of a service account").got(format!("{user:.200?}")))?;
        Ok(Self { namespace: namespace.to_owned(), name: name.to_owned() })
    }
}

impl AccountRights {
    /// True if pods of `account` may name `name`.
    pub(in crate::agent) fn allow(&self, account: &ServiceAccount, name: &Name) -> bool {
        self.rules_of(account).any(|rule| rule.names.take(name.as_str()))
    }

    /// True if a rule is about `account`.
    pub(in crate::agent) fn know(&self, account: &ServiceAccount) -> bool {
        self.rules_of(account).next().is_some()
    }

    fn rules_of(&self, account: &ServiceAccount) -> impl Iterator<Item = &AccountRule> {
        let of = |rule: &&AccountRule| rule.namespaces.take(&account.namespace) && rule.accounts.take(&account.name);
        self.rules.iter().filter(of)
    }

    /// Checks that a pod of `account` may use names by the rules.
    ///
    /// # Errors
    /// Not found, for a name that it may not use; usage, for a run whose steps have no names.
    pub(in crate::agent) fn check(&self, account: &ServiceAccount, PodNames { saves, reads }: &PodNames) -> Result<()> {
        let who = account.text();
        for run in saves {
            if !self.allow(account, &a_step(run)?) {
                return Err(Error::not_found(format!("{who} may not save checkpoints"))
                    .at(run)
                    .help("`allow` in the settings of the agent says which names it may use"));
            }
        }
        for selector in reads {
            let allowed = match selector {
                Selector::Name(name) => self.allow(account, name),
                Selector::Step { run, .. } => self.allow(account, &a_step(run)?),
            };
            if !allowed {
                return Err(no_such_name(&who, selector));
            }
        }
        Ok(())
    }

    /// Resolves the names that a pod of `account` uses. A run without steps is a warning: a training begins so.
    ///
    /// # Errors
    /// Not found, for a name that the account may not use: the same one, whether there is such a name or not. Else as
    /// [`Exchange::name_view`](crate::transfer::exchange::Exchange::name_view).
    ///
    /// # Cancel safety
    /// Safe: it only reads.
    pub(in crate::agent) async fn resolve(
        &self,
        agent: &AgentState,
        account: &ServiceAccount,
        names: &PodNames,
    ) -> Result<ResolvedNames> {
        // Rights first: what is not allowed costs no look at the repository.
        self.check(account, names)?;
        let (who, PodNames { reads, .. }) = (account.text(), names);
        let view = self.view(agent, account, reads).await?;
        let allowed = |name: &Name| self.allow(account, name);
        let (identity, own) = (account.identity(&self.trust_domain)?, agent.credentials()?.identity());
        let mut found = ResolvedNames::default();
        let mut readable = view.among(allowed);
        for selector in reads {
            match (readable.choose(selector, "the repository"), selector) {
                (Ok(name), _) if view.permits(&identity, &name) => found.names.push(name),
                (Err(error), Selector::Step { .. }) if error.kind() == ErrorKind::NotFound => {
                    found.warnings.push(format!("there is no step {selector} yet, so none is restored"));
                }
                (Ok(_), _) => return Err(no_such_name(&who, selector)),
                (Err(error), _) if error.kind() == ErrorKind::NotFound => return Err(no_such_name(&who, selector)),
                (Err(error), _) => return Err(error),
            }
        }
        found.denied_here = found.names.iter().find(|name| !view.permits(&own, name)).cloned();
        Ok(found)
    }

    /// View of the repository that has all `selectors`, if there are such names.
    async fn view(
        &self,
        agent: &AgentState,
        account: &ServiceAccount,
        selectors: &BTreeSet<Selector>,
    ) -> Result<NameView> {
        let asked = Instant::now();
        let (exchange, repository) = (agent.exchange()?, agent.origin(None)?);
        let allowed = |name: &Name| self.allow(account, name);
        let view = exchange.name_view(repository, asked.checked_sub(FRESH), true).await?;
        let mut readable = view.among(allowed);
        if selectors.iter().all(|selector| readable.choose(selector, "the repository").is_ok()) {
            return Ok(view);
        }
        // It may have been saved since.
        exchange.name_view(repository, Some(asked), false).await
    }
}

/// A step of `run`: rules about the names of steps say who may use it.
fn a_step(run: &Name) -> Result<Name> {
    format!("{run}/step-0").parse()
}

fn no_such_name(who: &str, selector: &Selector) -> Error {
    Error::not_found(format!("there is no such name that {who} may read"))
        .at(selector)
        .help("it is absent, or `allow` in the settings of the agent or the policy do not permit it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_account_has_its_own_names_alone() {
        let all = |text: &str| Patterns::of(&[text]).unwrap();
        let rule = |accounts: &str, names: &str| AccountRule {
            namespaces: all("ml"),
            accounts: all(accounts),
            names: all(names),
        };
        let rights = AccountRights {
            rules: vec![rule("trainer", "run-7/*"), rule("**", "public/**")],
            trust_domain: "home".to_owned(),
        };
        let account =
            |namespace: &str, name: &str| ServiceAccount { namespace: namespace.to_owned(), name: name.to_owned() };
        let may = |account: &ServiceAccount, name: &str| rights.allow(account, &name.parse().unwrap());
        let trainer = account("ml", "trainer");
        assert!(may(&trainer, "run-7/step-1") && may(&trainer, "public/a/b") && !may(&trainer, "run-8/step-1"));
        let other = account("ml", "trainer.other");
        assert!(!may(&other, "run-7/step-1") && may(&other, "public/a"));
        assert!(!may(&account("ml2", "trainer"), "run-7/step-1") && !rights.know(&account("m", "trainer")));
        assert_eq!(trainer.identity("cluster.local").unwrap().to_string(), "spiffe://cluster.local/ns/ml/sa/trainer");
        assert!(account("ml/sa/x", "..").identity("cluster.local").is_err());
    }

    #[test]
    fn users_that_are_no_service_accounts_are_nobody() {
        let account = ServiceAccount::of_user("system:serviceaccount:ml:trainer").unwrap();
        assert_eq!((account.namespace.as_str(), account.name.as_str()), ("ml", "trainer"));
        for user in ["ann", "", "system:serviceaccount:ml", "system:serviceaccount::a", "system:serviceaccount:ml:"] {
            assert!(ServiceAccount::of_user(user).is_err(), "{user}");
        }
    }
}
