//! Checks of a bucket: the identity in use, and harmful rules.

use super::{Check, Outcome};
use crate::error::{ErrorKind, Result};
use crate::storage::{Bucket, LifecycleRule, ObjectLock, Versioning};

/// Endpoint, bucket and identity of the credentials.
pub(super) async fn address(bucket: &Bucket) -> [Check; 3] {
    let endpoint = match bucket.endpoint() {
        None => Check::ok("endpoint", "AWS"),
        Some(clear) if bucket.is_in_clear() => {
            Check::warn("endpoint", format!("{clear}: data and names cross the network in clear")).help("use https")
        }
        Some(endpoint) => Check::ok("endpoint", endpoint),
    };
    [endpoint, Check::ok("region", bucket.region()), credentials(bucket).await]
}

async fn credentials(bucket: &Bucket) -> Check {
    const WHAT: &str = "credentials";
    let found = async {
        let credentials = bucket.credentials();
        let (id, origin) = (credentials.key_id().await?, credentials.origin().await?);
        Ok(format!("key {} from {origin}", shortened(&id)))
    };
    let found: Result<String> = found.await;
    found.map_or_else(|error| Check::failed(WHAT, Outcome::Bad, &error), |seen| Check::ok(WHAT, seen))
}

/// Part of a key's id, enough to recognize it. Ids are not secret, but reports are pasted into tickets.
fn shortened(id: &str) -> String {
    let chars: Vec<char> = id.chars().collect();
    let (head, tail) = if chars.len() >= 16 { (4, 4) } else { (chars.len() / 4, chars.len() / 4) };
    let part = |range: &[char]| range.iter().collect::<String>();
    format!("{}...{}", part(&chars[..head]), part(&chars[chars.len() - tail..]))
}

/// Versioning, lifecycle, object lock.
pub(super) async fn rules(bucket: &Bucket) -> Vec<Check> {
    let mut checks = vec![asked("versioning", bucket.versioning().await.map(versioning))];
    match bucket.lifecycle().await {
        Ok(rules) => checks.extend(lifecycle(&rules)),
        Err(error) => checks.push(asked("lifecycle", Err(error))),
    }
    checks.push(asked("object lock", bucket.object_lock().await.map(|lock| object_lock(lock.as_ref()))));
    checks
}

/// Check for a store without the feature, which therefore passes.
fn asked(what: &str, answer: Result<Check>) -> Check {
    match answer {
        Ok(check) => check,
        Err(error) if error.kind() == ErrorKind::Unsupported => Check::ok(what, "the store has no such thing"),
        Err(error) => Check::unanswered(what, &error),
    }
}

fn versioning(found: Versioning) -> Check {
    const WHAT: &str = "versioning";
    match found {
        Versioning::Off => Check::ok(WHAT, "off"),
        Versioning::Suspended => Check::ok(WHAT, "suspended; versions from before stay and are paid for"),
        Versioning::Enabled => Check::warn(WHAT, "on: what `towline collect` deletes is kept and paid for")
            .help("turn it off, or add a lifecycle rule that expires noncurrent versions"),
    }
}

/// One check for each harmful rule, or one that says there is none.
fn lifecycle(rules: &[LifecycleRule]) -> Vec<Check> {
    const WHAT: &str = "lifecycle";
    let named = |rule: &LifecycleRule| format!("rule {:?} on {:?}", rule.id, rule.prefix);
    let hurting: Vec<Check> = rules
        .iter()
        .filter(|rule| rule.hurts())
        .map(|rule| {
            let does =
                if rule.expires { "deletes objects by age, packs in use too" } else { "moves packs out of reach" };
            Check::bad(WHAT, format!("{} {does}", named(rule)))
                .help("remove it, or keep it off this prefix; `towline collect` deletes what nothing needs")
        })
        .collect();
    if !hurting.is_empty() {
        return hurting;
    }
    let enabled: Vec<String> = rules.iter().filter(|rule| rule.enabled).map(named).collect();
    let detail = if enabled.is_empty() { "no rule".to_owned() } else { format!("harmless: {}", enabled.join(", ")) };
    vec![Check::ok(WHAT, detail)]
}

fn counted(count: i32, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

fn object_lock(lock: Option<&ObjectLock>) -> Check {
    const WHAT: &str = "object lock";
    let Some(lock) = lock else { return Check::ok(WHAT, "off") };
    let Some(mode) = &lock.mode else {
        return Check::warn(WHAT, "on, without a default retention: what is deleted is kept as an old version")
            .help("use a bucket without object lock, or expire noncurrent versions by a lifecycle rule");
    };
    let period = match (lock.days, lock.years) {
        (Some(days), _) => counted(days, "day"),
        (None, Some(years)) => counted(years, "year"),
        (None, None) => "a time".to_owned(),
    };
    Check::bad(WHAT, format!("{mode} for {period}: nothing is freed before, and `towline collect` cannot delete"))
        .help("use a bucket without a default retention")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(expires: bool, moves_to: &[&str]) -> LifecycleRule {
        LifecycleRule {
            id: "r".into(),
            prefix: String::new(),
            enabled: true,
            expires,
            moves_to: moves_to.iter().map(ToString::to_string).collect(),
            aborts_after_days: Some(7),
        }
    }

    #[test]
    fn only_rules_that_take_packs_away_are_bad() {
        let outcomes = |rules: &[LifecycleRule]| lifecycle(rules).iter().map(|c| c.outcome).collect::<Vec<_>>();
        assert_eq!(outcomes(&[]), [Outcome::Ok]);
        assert_eq!(outcomes(&[rule(false, &["STANDARD_IA"])]), [Outcome::Ok]);
        assert_eq!(outcomes(&[rule(true, &[]), rule(false, &["DEEP_ARCHIVE"]), rule(false, &[])]), [Outcome::Bad; 2]);
        assert_eq!(outcomes(&[LifecycleRule { enabled: false, ..rule(true, &[]) }]), [Outcome::Ok]);
    }

    #[test]
    fn a_lock_is_a_warning_and_a_retention_is_bad() {
        let lock = ObjectLock { mode: None, days: None, years: None };
        assert_eq!(object_lock(None).outcome, Outcome::Ok);
        assert_eq!(object_lock(Some(&lock)).outcome, Outcome::Warn);
        let retention = ObjectLock { mode: Some("COMPLIANCE".into()), days: Some(30), ..lock };
        assert_eq!(object_lock(Some(&retention)).outcome, Outcome::Bad);
        assert!(object_lock(Some(&retention)).detail.contains("COMPLIANCE for 30 days"));
    }

    #[test]
    fn key_ids_are_not_shown_whole() {
        assert_eq!(shortened("AKIAIOSFODNN7EXAMPLE"), "AKIA...MPLE");
        assert_eq!(shortened("towline"), "t...e");
        assert_eq!(shortened(""), "...");
    }
}
