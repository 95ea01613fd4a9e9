//! Needs of a pass: those of accounts that a rule is about, each once, within limits of their memory. Anybody may create
//! workloads and pods, and choose what they name.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use super::finding::{Finding, SiteFinding, absence};
use super::needs::Need;
use crate::agent::pods::{AccountRights, ServiceAccount};
use crate::error::ErrorKind;
use crate::size::show;

/// Bytes of memory of the needs of a pass, about, and of those of one namespace.
const LEN_MAX: usize = 64 << 20;
const NAMESPACE_LEN_MAX: usize = LEN_MAX / 4;

/// Needs of a pass.
pub(in crate::agent) struct Gathering {
    rights: Arc<AccountRights>,
    /// Needs of the pass before: the same ones are not kept again.
    before: BTreeSet<Arc<Need>>,
    pub(super) needs: BTreeSet<Arc<Need>>,
    /// The same, in the order in which they were added.
    pub(super) in_order: Vec<Arc<Need>>,
    /// Bytes of memory that they take.
    pub(in crate::agent) len: usize,
    by_namespace: BTreeMap<String, usize>,
}

impl Gathering {
    /// None yet. The needs of the pass `before` share their memory with the same ones of this.
    pub(in crate::agent) fn new(rights: Arc<AccountRights>, before: BTreeSet<Arc<Need>>) -> Self {
        let (needs, in_order, by_namespace) = Default::default();
        Self { rights, before, needs, in_order, len: 0, by_namespace }
    }

    /// Adds a need, unless it is there. Those that are added first have room first. `waited` is the time for which its pods have
    /// waited.
    ///
    /// # Errors
    /// Finding about a need that is not kept: no rule is about its account, or others take the memory.
    pub(in crate::agent) fn add(&mut self, need: Need, waited: Duration) -> Result<Arc<Need>, SiteFinding> {
        if let Some(known) = self.needs.get(&need) {
            return Ok(Arc::clone(known));
        }
        let len = need.len();
        if let Some(finding) = unknown(&self.rights, &need, waited).or_else(|| self.lack(&need.account, len)) {
            return Err(SiteFinding { site: need.site, finding, notes: Vec::new() });
        }
        self.len += len;
        *self.by_namespace.entry(need.account.namespace.clone()).or_default() += len;
        let need = self.before.get(&need).map_or_else(|| Arc::new(need), Arc::clone);
        self.needs.insert(Arc::clone(&need));
        self.in_order.push(Arc::clone(&need));
        Ok(need)
    }

    /// Finding that there is no room for another need of `len` bytes, if so.
    fn lack(&self, account: &ServiceAccount, len: usize) -> Option<Finding> {
        let namespace = &account.namespace;
        let own = self.by_namespace.get(namespace).copied().unwrap_or(0);
        let (whose, max) = if own + len > NAMESPACE_LEN_MAX {
            (format!("namespace {namespace} waits"), NAMESPACE_LEN_MAX)
        } else if self.len + len > LEN_MAX {
            ("all namespaces wait".to_owned(), LEN_MAX)
        } else {
            return None;
        };
        let text = format!("the names that {whose} for exceed {} of memory", show(max as u64));
        Some(Finding::Postponed(format!("{text}; the longest wait comes first")))
    }
}

/// Finding about the names of an account that no rule is about.
fn unknown(rights: &AccountRights, Need { account, names, .. }: &Need, waited: Duration) -> Option<Finding> {
    if rights.know(account) {
        return None;
    }
    let refused = rights.check(account, names).err()?;
    Some(match refused.kind() {
        ErrorKind::NotFound => Finding::Absent(waited, absence(&refused)),
        _ => Finding::Failing(waited, refused.to_string()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::pods::{AccountRule, PodNames};
    use crate::pattern::Patterns;

    fn rights(namespaces: &str) -> Arc<AccountRights> {
        let all = |text: &str| Patterns::of(&[text]).unwrap();
        let rule = AccountRule { namespaces: all(namespaces), accounts: all("trainer"), names: all("open/**") };
        Arc::new(AccountRights { rules: vec![rule], trust_domain: "home".to_owned() })
    }

    fn need((namespace, account): (&str, &str), names: PodNames) -> Need {
        let account = ServiceAccount { namespace: namespace.to_owned(), name: account.to_owned() };
        Need { account, names, site: "home".to_owned() }
    }

    fn reads(names: &[String]) -> PodNames {
        PodNames { reads: names.iter().map(|name| name.parse().unwrap()).collect(), ..PodNames::default() }
    }

    /// The need number `n` of a namespace, which takes more than a quarter of a megabyte.
    fn long(namespace: &str, n: usize) -> Need {
        let names: Vec<String> = (0..256).map(|input| format!("open/{n}-{input}-{}", "x".repeat(450))).collect();
        need((namespace, "trainer"), reads(&names))
    }

    #[test]
    fn accounts_without_a_rule_are_told_that_their_names_are_absent() {
        let found = |account: &str, names: PodNames| {
            let mut gathering = Gathering::new(rights("ml"), BTreeSet::new());
            let added = gathering.add(need(("ml", account), names), Duration::ZERO);
            assert_eq!(added.is_ok(), gathering.len > 0 && gathering.needs.len() == 1 && gathering.in_order.len() == 1);
            added.map_err(|found| match found.finding {
                Finding::Absent(_, text) => text,
                other => format!("{other:?}"),
            })
        };
        let text = found("other", reads(&["open/x".to_owned()])).unwrap_err();
        assert!(text.starts_with("there is no such name that service account ml/other may read at open/x"), "{text}");
        assert!(text.ends_with("or the policy do not permit it)"), "{text}");
        let saves = PodNames { saves: BTreeSet::from(["run".parse().unwrap()]), ..PodNames::default() };
        assert!(found("other", saves).unwrap_err().starts_with("service account ml/other may not save checkpoints"));
        // Names that a known account may not read are looked up, as those that are not there.
        for name in ["open/x", "secret/x"] {
            assert!(found("trainer", reads(&[name.to_owned()])).is_ok());
        }
    }

    #[test]
    fn needs_are_kept_once_and_within_limits() {
        let mut gathering = Gathering::new(rights("**"), BTreeSet::new());
        let first = gathering.add(long("a", 0), Duration::ZERO).unwrap();
        let len = gathering.len;
        assert!(len > 256 * 1024, "{len}");
        assert!(Arc::ptr_eq(&first, &gathering.add(long("a", 0), Duration::ZERO).unwrap()) && gathering.len == len);
        let fill = |gathering: &mut Gathering, namespace: &str| {
            (1..).find_map(|n| gathering.add(long(namespace, n), Duration::ZERO).err()).map(|found| found.finding)
        };
        let postponed = |text: &str| Some(Finding::Postponed(text.to_owned()));
        let text = "the names that namespace a waits for exceed 16.0 MiB of memory; the longest wait comes first";
        assert_eq!(fill(&mut gathering, "a"), postponed(text));
        assert!(gathering.len <= NAMESPACE_LEN_MAX && gathering.len > NAMESPACE_LEN_MAX - 2 * len);
        for namespace in ["b", "c", "d", "e"] {
            gathering.add(long(namespace, 0), Duration::ZERO).unwrap();
        }
        let all = ["b", "c", "d", "e"].map(|namespace| fill(&mut gathering, namespace));
        let text = "the names that all namespaces wait for exceed 64.0 MiB of memory; the longest wait comes first";
        assert_eq!(all[3], postponed(text));
        assert!(gathering.len <= LEN_MAX && gathering.len > LEN_MAX - 2 * len);
        // The next pass does not keep again what is still needed.
        let mut next = Gathering::new(rights("**"), gathering.needs);
        assert!(next.len == 0 && Arc::ptr_eq(&first, &next.add(long("a", 0), Duration::ZERO).unwrap()));
    }
}
