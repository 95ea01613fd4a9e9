//! Limits of a save with a token: names, paths, labels and bases.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::caller::Caller;
use crate::agent::tokens::{Grant, check_named};
use crate::error::{Error, Result};
use crate::name::Name;
use crate::policy::Labels;
use crate::repository::NameScope;
use crate::work::blocking;

/// Names whose labels a save with a token may make stricter (those that it may save), and names whose chunks may be bases (those that
/// it may read).
pub(super) fn name_scopes(grant: Option<&Arc<Grant>>) -> (NameScope, NameScope) {
    let Some(grant) = grant else { return (NameScope::default(), NameScope::default()) };
    let (saves, reads) = (Arc::clone(grant), Arc::clone(grant));
    (
        NameScope::only(move |name| saves.scopes().may_save(name)),
        NameScope::only(move |name| reads.scopes().may_read(name)),
    )
}

/// Checks the labels of a save with a token. The token must be able to read the names in `derived-from`, whose labels would reveal
/// them, and may only give its own `tenant`, because the chunks count against that one's quota.
///
/// # Errors
/// Denied, whether the name exists or not; usage, for a malformed label.
pub(super) fn check_labels(grant: &Grant, labels: &BTreeMap<String, String>) -> Result<(), Error> {
    let (labels, _) = Labels::split(labels)?;
    if let Some(tenant) = labels.tenants().iter().find(|tenant| Some(tenant.as_str()) != grant.tenant()) {
        let own = grant.tenant().map_or_else(|| "no label `tenant`".to_owned(), |own| format!("tenant={own}"));
        return Err(Error::denied("token does not permit the label `tenant` of a save")
            .expected(own)
            .got(format!("tenant={tenant}"))
            .help("a token may only give the tenant that it was created with; the agent's user can set other labels"));
    }
    match labels.origins().iter().find(|origin| !grant.scopes().may_read(origin)) {
        Some(origin) => {
            Err(Error::denied("token does not permit reading a name in the label `derived-from`").got(origin))
        }
        None => Ok(()),
    }
}

/// `path`, if the caller may save it as `name`. The scopes of a token are checked before any lookup.
///
/// # Errors
/// Denied, if a token does not permit that name or that path.
pub(super) async fn allowed_path(caller: &Caller, name: &Name, path: PathBuf) -> Result<PathBuf> {
    let Some(grant) = caller.grant().cloned() else { return Ok(path) };
    if !grant.scopes().may_save(name) {
        return Err(Error::denied("token does not permit saving under this name")
            .at(name)
            .help("its scopes save=PATTERN do not match; the agent's user can create another token"));
    }
    blocking(move || check_named(grant.scopes(), &path)).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::tokens::Tokens;
    use crate::agent::tokens::tests::granted;
    use crate::clock::{ManualClock, Timestamp};
    use crate::error::ErrorKind;

    #[test]
    fn a_token_saves_for_no_other_tenant() {
        let dir = tempfile::tempdir().unwrap();
        let tokens = Tokens::open(&dir.path().join("tokens"), Arc::new(ManualClock::at(Timestamp(0)))).unwrap();
        let saved = |own: Option<&str>, label: &str| {
            let grant = granted(&tokens, own, &["save=**", "folder=/ckpt"]);
            check_labels(&grant, &BTreeMap::from([("tenant".to_owned(), label.to_owned())]))
        };
        assert!(saved(Some("team-b"), "team-b").is_ok());
        for (own, label) in [(Some("team-b"), "clinic"), (Some("team-b"), "team-b,clinic"), (None, "clinic")] {
            let refused = saved(own, label).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Denied, "{refused:?}");
            assert!(refused.to_string().contains("tenant=clinic"), "{refused}");
        }
    }
}
