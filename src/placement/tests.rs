//! Hints, by numbers that were computed by hand.

use std::sync::Arc;

use super::*;
use crate::clock::Timestamp;
use crate::error::{ErrorKind, Result};
use crate::format::{CacheSpace, Inventory, KeySet, LinkRate};
use crate::identity::Identity;
use crate::policy::Labels;

const GIB: u64 = 1 << 30;

/// `home` has the repository, `burst` rents GPUs, `edge` has no links.
const SITES: &str = r#"
[[site]]
name = "home"
repositories = "s3://models"
provider = "aws"
region = "us-east-1"
storage = "aws/s3-standard"

[[site]]
name = "burst"
gpus = [{ model = "H100", count = 512, usd_hour = "2.5" }]

[[site]]
name = "edge"

[[link]]
from = "home"
to = "burst"
rate = "8Gbit"
delay = "100ms"
price = "aws/internet"

[[link]]
from = "burst"
to = "home"
rate = "8Gbit"
price = { unit = "GB", usd = "0.02" }
"#;

fn key(n: u64) -> u64 {
    crate::id::ChunkId::of(&n.to_le_bytes()).prefix()
}

fn at(site: &str, keys: std::ops::Range<u64>, pinned: std::ops::Range<u64>) -> Inventory {
    Inventory {
        agent: Identity::new(site, "a").unwrap(),
        sequence: 1,
        at: Timestamp(0),
        space: CacheSpace { capacity: 100 * GIB, used: 90 * GIB, promised: 10 * GIB },
        held: KeySet::of(keys.map(key).collect()),
        pinned: KeySet::of(pinned.map(key).collect()),
        promised: KeySet::default(),
        links: Vec::new(),
    }
}

fn request() -> HintRequest {
    HintRequest {
        api_version: API_VERSION.to_owned(),
        inputs: vec![HintInput { reference: "run/step-1".to_owned() }],
        ..HintRequest::default()
    }
}

/// Asks for 20 chunks of a GiB.
fn asked(request: &HintRequest, inventories: &[Inventory], month: &[(&str, u64)]) -> Result<Hint> {
    let book = PriceBook::built_in();
    let sites = Sites::read(SITES, &book).unwrap();
    let closure = Closure::of_chunks((0..20).map(|n| (key(n), 1 << 30)).collect());
    let snapshot = Snapshot {
        at: Timestamp(90_000_000_000),
        log: 7,
        repository: ["s3://models".to_owned(), "01K9ZQBF5628NEHV0HKGX7E3TC".to_owned()],
        sites: &sites,
        book: &book,
        agents: Vec::new(),
        unknown: std::collections::BTreeSet::new(),
        policy: None,
        gaps: Vec::new(),
        month_so_far: Arc::new(month.iter().map(|(meter, bytes)| ((*meter).to_owned(), *bytes)).collect()),
        hash: blake3::hash(b""),
    };
    let inputs = [Input {
        name: "run/step-1".parse().unwrap(),
        labels: Labels::default(),
        saved: Timestamp(0),
        step_seconds: Some(4.0),
    }];
    hint(&snapshot, request, &inputs, &Holdings::of(Arc::new(closure), inventories, snapshot.at))
}

fn site<'h>(hint: &'h Hint, name: &str) -> &'h Candidate {
    hint.candidates.iter().find(|candidate| candidate.site == name).unwrap()
}

#[test]
fn a_site_to_return_to_must_be_known_whatever_is_compared() {
    let mut request = request();
    request.outputs = vec![HintOutput { bytes: 1, every_s: 1800, return_to: "nowhere".to_owned() }];
    for candidates in [Vec::new(), vec![HintCandidate { site: "home".to_owned() }]] {
        request.candidates = candidates;
        let error = asked(&request, &[], &[]).unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::NotFound, Some("nowhere")), "{error}");
    }
}

#[test]
fn bytes_time_and_dollars_are_those_computed_by_hand() {
    let mut request = request();
    request.workload = Workload { gpus: 64, gpu_usd_h: None, runtime_s: 4 * 3600, deadline: None };
    request.outputs = vec![HintOutput { bytes: 10_000_000_000, every_s: 1800, return_to: "home".to_owned() }];
    // 90 of the 100 free GiB of the month are used up.
    let found = asked(&request, &[at("burst", 0..5, 2..4)], &[("aws/internet", 90 * GIB)]).unwrap();
    let burst = site(&found, "burst");
    let bytes = burst.bytes;
    assert_eq!((bytes.present, bytes.pinned, bytes.missing), (5 * GIB, 2 * GIB, 15 * GIB));
    // 15 GiB at 10^9 bytes a second, and 0.1 s.
    assert_eq!((burst.eta_s.p50, burst.eta_s.basis), (16.206, Some(TimeBasis::Modelled)));
    assert_eq!((burst.eta_s.p10, burst.eta_s.p90), (10.804, 24.309));
    assert_eq!(burst.eta_s.bottleneck.as_deref(), Some("internet:home>burst"));
    let dollars = &burst.usd_micro;
    // 10 GiB are free, 5 cost $0.09.
    assert_eq!(dollars.egress, 450_000);
    // 1,920 reads at $0.40 a million.
    assert_eq!(dollars.requests, 768);
    // 8 checkpoints of 10 GB at $0.02.
    assert_eq!(dollars.way_back, 1_600_000);
    // 64 GPUs at $2.50 for 16.206 s.
    assert_eq!(dollars.stall, 720_266);
    assert_eq!((dollars.total, dollars.complete), (450_000 + 768 + 1_600_000 + 720_266, true));
    assert_eq!(burst.capacity.must_evict, 5 * GIB);
    assert_eq!((burst.capacity.free, burst.capacity.fits), (Some(10 * GIB), Some(true)));
    assert_eq!(burst.inventory_age_s, Some(90));
    // The repository is at home: bytes come from there at no price.
    let home = site(&found, "home");
    assert_eq!((home.bytes.missing, home.usd_micro.egress, home.rank), (20 * GIB, 0, 2));
    // The own repository takes 17.179 s: a hundred times (16.206 + 1) over (17.179 + 1).
    assert_eq!((home.score, burst.rank), (95, 1));
    // To an unknown link there is no price.
    assert!(!found.complete && !site(&found, "edge").usd_micro.complete, "{:?}", found.notes);
}

#[test]
fn a_cache_of_another_site_is_a_source_where_it_is_cheaper() {
    let mut request = request();
    request.candidates = vec![HintCandidate { site: "home".to_owned() }, HintCandidate { site: "burst".to_owned() }];
    let found = asked(&request, &[at("burst", 0..20, 0..0), at("home", 0..3, 0..0)], &[]).unwrap();
    assert_eq!(found.candidates[0].site, "burst");
    assert_eq!((found.candidates[0].score, found.candidates[0].eta_s.p90), (100, 0.0));
    let home = site(&found, "home");
    // The own repository costs nothing, and is faster than the link.
    assert_eq!((home.sources.len(), home.sources[0].repository), (1, true));
    let found = asked(&request, &[at("home", 0..20, 0..0)], &[]).unwrap();
    let sources = &site(&found, "burst").sources;
    assert_eq!((sources.len(), sources[0].repository, sources[0].bytes), (1, false, 20 * GIB));
}

#[test]
fn caches_of_agents_that_ended_count_at_their_site_and_are_no_sources() {
    let mut ended = at("home", 0..20, 0..0);
    ended.at = Timestamp(90_000_000_000 - 3_600_000_000_000);
    let from_home = |inventories: &[Inventory]| {
        let found = asked(&request(), inventories, &[]).unwrap();
        let home = site(&found, "home");
        assert_eq!((home.bytes.present, home.bytes.missing), (20 * GIB, 0));
        let sends_nothing = home.reasons.iter().any(|reason| reason.starts_with("no agent of it runs"));
        let sources = site(&found, "burst").sources.iter().filter(|source| !source.repository);
        (sources.map(|source| source.bytes).sum::<u64>(), sends_nothing)
    };
    assert_eq!(from_home(&[ended.clone()]), (0, true));
    assert_eq!(from_home(&[ended, at("home", 0..5, 0..0)]), (5 * GIB, false));
}

#[test]
fn a_measured_link_counts_more_than_what_is_believed() {
    let mut burst = at("burst", 0..5, 0..0);
    let link = |site: &str, rate: u64, samples: u32| LinkRate {
        site: site.to_owned(),
        rate,
        spread: 120,
        samples,
        ..LinkRate::default()
    };
    burst.links = vec![link("", 1 << 30, 28)];
    // Another agent of the site has measured much less often.
    let mut other = at("burst", 0..5, 0..0);
    other.links = vec![link("", 1, 1)];
    for inventories in [[burst.clone(), other.clone()], [other, burst]] {
        let found = asked(&request(), &inventories, &[]).unwrap();
        let eta = &site(&found, "burst").eta_s;
        // 15 GiB at a GiB a second, and 0.1 s; the spread is 1.2.
        assert_eq!((eta.p10, eta.p50, eta.p90), (12.583, 15.1, 18.12));
        assert_eq!((eta.basis, eta.samples), (Some(TimeBasis::Measured), 28));
        assert_eq!(site(&found, "home").eta_s.basis, Some(TimeBasis::Default));
    }
}

#[test]
fn the_objective_decides_the_order() {
    let mut request = request();
    request.candidates = vec![HintCandidate { site: "home".to_owned() }, HintCandidate { site: "burst".to_owned() }];
    request.workload = Workload { gpus: 8, gpu_usd_h: Some(2.0), runtime_s: 0, deadline: None };
    // `burst` has half: it is faster, and costs egress.
    let first = |objective| {
        request.objective = objective;
        let found = asked(&request, &[at("burst", 0..15, 0..0)], &[("aws/internet", 200 * GIB)]).unwrap();
        let reasons = found.candidates[1].reasons.clone();
        (found.candidates[0].site.clone(), reasons)
    };
    let of = |mode| Objective { mode, ..Objective::default() };
    let mut first = first;
    assert_eq!(first(of(Mode::Time)).0, "burst");
    assert_eq!(first(of(Mode::Cost)).0, "home");
    assert_eq!(first(Objective { usd_per_hour: 1.0, ..of(Mode::Weighted) }).0, "home");
    assert_eq!(first(Objective { usd_per_hour: 1_000.0, ..of(Mode::Weighted) }).0, "burst");
    let (site, reasons) = first(Objective { max_usd: Some(0.3), ..of(Mode::Time) });
    assert_eq!(site, "home");
    assert!(reasons.contains(&"costs more than $0.3".to_owned()), "{reasons:?}");
}

#[test]
fn the_same_snapshot_and_request_give_the_same_bytes() {
    let request = request();
    let inventories = [at("burst", 0..5, 0..0), at("home", 3..9, 0..0)];
    let json = |inventories: &[Inventory]| serde_json::to_string(&asked(&request, inventories, &[]).unwrap());
    let one = json(&inventories).unwrap();
    let [burst, home] = inventories;
    assert_eq!(one, json(&[home, burst]).unwrap());
}

#[test]
fn what_cannot_be_answered_is_refused() {
    let mut wrong = request();
    wrong.candidates = vec![HintCandidate { site: "moon".to_owned() }];
    let error = asked(&wrong, &[], &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
    assert!(format!("{error}").contains("one of burst, edge, home"), "{error}");
    let mut wrong = request();
    wrong.objective.quantile = 0.7;
    assert_eq!(asked(&wrong, &[], &[]).unwrap_err().kind(), ErrorKind::Usage);
    let mut wrong = request();
    wrong.workload.gpu_usd_h = Some(f64::NAN);
    assert_eq!(asked(&wrong, &[], &[]).unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn sites_where_the_job_would_end_too_late_rank_behind_and_unsaved_work_is_a_number() {
    let asked_by = |deadline: &str| {
        let mut request = request();
        request.workload = Workload { runtime_s: 3600, deadline: Some(deadline.to_owned()), ..Workload::default() };
        asked(&request, &[], &[]).unwrap()
    };
    // At home nothing moves over a link: 20 GiB at 10 Gbit/s are 17.2 s; to burst they take 21.6 s. The snapshot is of 00:01:30.
    for (deadline, late) in [("1970-01-01T01:01:52Z", 0), ("1970-01-01T01:01:50Z", 1), ("1970-01-01T00:00:00Z", 2)] {
        let found = asked_by(deadline);
        let is_late = |candidate: &&Candidate| candidate.reasons.iter().any(|reason| reason.contains("deadline"));
        let sites: Vec<&str> = found
            .candidates
            .iter()
            .filter(|one| one.site != "edge")
            .filter(is_late)
            .map(|one| one.site.as_str())
            .collect();
        assert_eq!(sites.len(), late, "{deadline}: {sites:?}");
    }
    // Nothing is missing there, and it is too late all the same.
    let mut past = request();
    past.workload.deadline = Some("1970-01-01T00:01:00Z".to_owned());
    let found = asked(&past, &[at("burst", 0..20, 0..0)], &[]).unwrap();
    assert!(site(&found, "burst").reasons.iter().any(|reason| reason.contains("deadline")), "{found:?}");
    let found = asked_by("1970-01-01T02:00:00+01:00");
    assert_eq!(
        (found.generated_at.as_str(), found.valid_until.as_str()),
        ("1970-01-01T00:01:30Z", "1970-01-01T00:02:30Z")
    );
    assert_eq!((found.at_risk[0].seconds, found.at_risk[0].steps), (90, Some(22.5)));
    let mut wrong = request();
    wrong.workload.deadline = Some("tomorrow".to_owned());
    assert_eq!(asked(&wrong, &[], &[]).unwrap_err().kind(), ErrorKind::Usage);
}
