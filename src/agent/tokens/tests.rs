//! Tokens: made, shown, expired, revoked, read again, and their file.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use super::*;
use crate::clock::ManualClock;
use crate::error::ErrorKind;

const SECOND: Duration = Duration::from_secs(1);

fn spec(scopes: &[&str], lasting: Option<Duration>) -> TokenSpec {
    TokenSpec { scopes: Scopes::of(scopes).unwrap(), name: Some("ci".into()), tenant: None, lasting }
}

fn clock() -> Arc<ManualClock> {
    Arc::new(ManualClock::at(Timestamp(1_000)))
}

/// A new token with `scopes`.
pub(in crate::agent) fn granted(tokens: &Tokens, tenant: Option<&str>, scopes: &[&str]) -> Arc<Grant> {
    let spec = TokenSpec { tenant: tenant.map(str::to_owned), ..spec(scopes, None) };
    tokens.find(&tokens.make(None, spec).unwrap().secret).unwrap()
}

#[test]
fn a_token_holds_until_it_expires_or_is_revoked_and_through_restarts() {
    let dir = tempfile::tempdir().unwrap();
    let (file, clock) = (dir.path().join("own/tokens"), clock());
    let open = || Tokens::open(&file, Arc::<ManualClock>::clone(&clock)).unwrap();
    let tokens = open();
    assert!(tokens.list().is_empty() && !file.exists());
    let short = tokens.make(None, spec(&["read=a/**"], Some(SECOND))).unwrap();
    let long = tokens.make(None, spec(&["admin"], None)).unwrap();
    assert!(short.secret.starts_with(PREFIX) && short.secret.len() == PREFIX.len() + 64);
    assert_ne!(short.secret, long.secret);
    let text = fs::read_to_string(&file).unwrap();
    assert!(!text.contains(&short.secret) && !text.contains(&short.secret[PREFIX.len()..]), "only a hash is kept");
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    assert_eq!(tokens.list()[0].used, None);
    assert!(tokens.find(&short.secret).is_some() && tokens.list()[0].used.is_some());
    for wrong in ["", "towline_", &short.secret[PREFIX.len()..], &format!("{}0", short.secret), &short.token.id] {
        assert!(tokens.find(wrong).is_none(), "{wrong}");
    }
    drop(tokens);

    let tokens = open();
    assert_eq!(tokens.find(&short.secret).unwrap().scopes().texts(), ["read=a/**"]);
    clock.set(Timestamp(1_000 + 1_000_000_000));
    assert!(tokens.find(&short.secret).is_none() && tokens.find(&long.secret).is_some());
    tokens.revoke(&long.token.id).unwrap();
    assert!(tokens.find(&long.secret).is_none());
    assert_eq!(tokens.revoke(&long.token.id).unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(tokens.revoke("../x").unwrap_err().kind(), ErrorKind::NotFound);
    drop(tokens);
    let tokens = open();
    assert!(tokens.find(&long.secret).is_none());
    // One that expired is forgotten when the next is made.
    tokens.make(None, spec(&["metrics"], None)).unwrap();
    assert_eq!(tokens.list().len(), 1);
}

#[test]
fn a_file_that_others_could_have_written_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("tokens");
    let open = || Tokens::open(&file, clock());
    open().unwrap().make(None, spec(&["admin"], None)).unwrap();
    let good = fs::read_to_string(&file).unwrap();
    for mode in [0o666, 0o620, 0o602] {
        fs::set_permissions(&file, fs::Permissions::from_mode(mode)).unwrap();
        assert_eq!(open().unwrap_err().kind(), ErrorKind::Denied, "{mode:o}");
    }
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    if rustix::process::geteuid().is_root() {
        rustix::fs::chown(&file, Some(rustix::fs::Uid::from_raw(4711)), None).unwrap();
        assert!(open().unwrap_err().to_string().contains("user 4711"));
        rustix::fs::chown(&file, Some(rustix::fs::Uid::ROOT), None).unwrap();
    }
    for (text, kind) in [
        (String::new(), ErrorKind::Damaged),
        (good[..good.len() / 2].to_owned(), ErrorKind::Damaged),
        (good.replace("\"version\": 1", "\"version\": 2"), ErrorKind::Unsupported),
        (good.replace("\"admin\"", "\"anything\""), ErrorKind::Damaged),
        (good.replace("\"hash\": \"", "\"hash\": \"x"), ErrorKind::Damaged),
        (good.replace("\"tenant\"", "\"tenants\""), ErrorKind::Damaged),
    ] {
        fs::write(&file, &text).unwrap();
        assert_eq!(open().unwrap_err().kind(), kind, "{text}");
    }
    fs::write(&file, &good).unwrap();
    let first = open().unwrap();
    assert_eq!(open().unwrap_err().kind(), ErrorKind::Conflict, "one agent at a time");
    drop(first);
    assert_eq!(open().unwrap().list().len(), 1);
}

#[test]
fn what_cannot_be_written_is_said_and_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("own/tokens");
    let tokens = Tokens::open(&file, clock()).unwrap();
    let kept = tokens.make(None, spec(&["read=a"], None)).unwrap();
    let before = fs::read_to_string(&file).unwrap();
    // A folder that is gone refuses root, too.
    fs::rename(dir.path().join("own"), dir.path().join("away")).unwrap();
    let error = tokens.make(None, spec(&["admin"], None)).unwrap_err();
    assert_eq!(error.help_text(), Some("no token was made; those that there were hold as before"));
    assert!(tokens.find(&kept.secret).is_some() && tokens.list().len() == 1);
    let error = tokens.revoke(&kept.token.id).unwrap_err();
    assert!(error.to_string().contains("revoked until the agent ends"), "{error}");
    assert!(tokens.find(&kept.secret).is_none(), "it holds no more all the same");
    fs::rename(dir.path().join("away"), dir.path().join("own")).unwrap();
    assert_eq!(fs::read_to_string(&file).unwrap(), before);
    tokens.revoke(&kept.token.id).unwrap();
    assert!(tokens.list().is_empty() && fs::read_to_string(&file).unwrap() != before);
}

#[test]
fn tokens_together_leave_connections_to_others() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tokens::open(&dir.path().join("tokens"), clock()).unwrap();
    let grants = [(); 4].map(|()| tokens.find(&tokens.make(None, spec(&["read=a"], None)).unwrap().secret).unwrap());
    let slots: Vec<_> = grants.iter().flat_map(|grant| (0..64).map(|_| tokens.begin_request(grant))).collect();
    let (admitted, refused): (Vec<_>, Vec<_>) = slots.into_iter().partition(Result::is_ok);
    assert_eq!((admitted.len(), refused.len()), (REQUESTS_MAX, 64));
    assert!(refused[0].as_ref().unwrap_err().to_string().contains("at most 192"));
    drop(admitted);
    assert!(tokens.begin_request(&grants[3]).is_ok());
}

#[test]
fn requests_of_the_tokens_of_a_tenant_are_limited_together() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tokens::open(&dir.path().join("tokens"), clock()).unwrap();
    let token = |tenant: Option<&str>| granted(&tokens, tenant, &["read=a"]);
    let own = [(); 3].map(|()| token(Some("team-a")));
    let slots: Vec<_> = own.iter().flat_map(|grant| (0..64).map(|_| tokens.begin_request(grant))).collect();
    let (admitted, refused): (Vec<_>, Vec<_>) = slots.into_iter().partition(Result::is_ok);
    assert_eq!((admitted.len(), refused.len()), (64, 128));
    let text = refused[0].as_ref().unwrap_err().to_string();
    assert!(text.contains("requests with tokens of this tenant are in progress: expected at most 64"), "{text}");
    let others = [token(Some("team-b")), token(None), token(None)];
    let others = others.each_ref().map(|grant| tokens.begin_request(grant));
    assert!(others.iter().all(Result::is_ok));
    // Another token of the tenant has no requests of its own.
    tokens.revoke(&own[0].id().to_string()).unwrap();
    assert!(tokens.begin_request(&token(Some("team-a"))).is_err());
    drop(admitted);
    assert!(tokens.begin_request(&own[1]).is_ok());
}

#[test]
fn malformed_labels_and_tenants_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tokens::open(&dir.path().join("tokens"), clock()).unwrap();
    let with = |name: &str, tenant: &str, lasting| {
        let (name, tenant) = (Some(name.to_owned()), Some(tenant.to_owned()));
        tokens.make(None, TokenSpec { name, tenant, lasting, ..spec(&["metrics"], None) }).map_err(|error| error.kind())
    };
    assert!(with("the CI of team a", "team-a", Some(SECOND)).is_ok());
    let long = "x".repeat(200);
    for (name, tenant, lasting) in [
        ("a\nb", "t", None),
        (long.as_str(), "t", None),
        ("a", "t/u", None),
        ("a", "", None),
        ("a", long.as_str(), None),
        ("a", "t", Some(Duration::ZERO)),
    ] {
        assert_eq!(with(name, tenant, lasting).unwrap_err(), ErrorKind::Usage, "{name} {tenant}");
    }
}

#[tokio::test]
async fn whoever_waits_for_its_end_is_told_of_either() {
    let dir = tempfile::tempdir().unwrap();
    let clock = clock();
    let tokens = Tokens::open(&dir.path().join("tokens"), Arc::<ManualClock>::clone(&clock)).unwrap();
    let short = tokens.make(None, spec(&["read=a"], Some(SECOND))).unwrap();
    let ended = tokio::spawn(tokens.ended(tokens.find(&short.secret).unwrap()));
    tokio::time::sleep(SECOND / 50).await;
    assert!(!ended.is_finished(), "the agent's clock counts");
    clock.set(Timestamp(2_000_000_000));
    ended.await.unwrap();
    let long = tokens.make(None, spec(&["read=a"], None)).unwrap();
    let ended = tokio::spawn(tokens.ended(tokens.find(&long.secret).unwrap()));
    tokens.revoke(&long.token.id).unwrap();
    ended.await.unwrap();
}

#[test]
fn nothing_is_made_with_a_token_that_was_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tokens::open(&dir.path().join("tokens"), clock()).unwrap();
    let made = tokens.make(None, spec(&["admin"], None)).unwrap();
    let grant = tokens.find(&made.secret).unwrap();
    assert_eq!(grant.holding(|| Ok(1)).unwrap(), 1);
    tokens.make(Some(&grant), spec(&["metrics"], None)).unwrap();
    tokens.revoke(&made.token.id).unwrap();
    assert_eq!(grant.holding(|| Ok(1)).unwrap_err().kind(), ErrorKind::Denied);
    let error = tokens.make(Some(&grant), spec(&["admin"], None)).unwrap_err();
    assert_eq!((error.kind(), tokens.list().len()), (ErrorKind::Denied, 1));
}
