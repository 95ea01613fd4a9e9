//! Usage, tests/golden/usage: signed reports, without and with GPU seconds.

use std::fs;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use towline::clock::Timestamp;
use towline::format::{Direction, SignedBytes, UsageKey, UsageReport, UsageTotals};
use towline::id::RepositoryId;

fn golden(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/usage").join(file)
}

fn report() -> UsageReport {
    let line = |day, way, site: &str, name: &str, tenant: &str, bytes| {
        let text = str::to_owned;
        let key = UsageKey { day, way, site: text(site), name: text(name), tenant: text(tenant) };
        (key, UsageTotals { bytes, requests: u64::from(site.is_empty()), gpu_seconds: 0 })
    };
    UsageReport {
        repository: RepositoryId::from_bytes([7; 16]),
        month: "2026-11".parse().unwrap(),
        started: Timestamp(1_795_000_000_000_000_000),
        sequence: 300,
        at: Timestamp(1_795_600_000_000_000_000),
        lines: vec![
            line(1, Direction::In, "", "", "", 12_345),
            line(1, Direction::In, "", "run-7", "team-a,team-b", 1 << 40),
            line(1, Direction::Out, "west", "run-7", "team-a,team-b", u64::MAX),
            line(30, Direction::In, "west", "datasets/web", "", 0),
        ],
    }
}

/// The same, of version 2.
fn report_with_gpus() -> UsageReport {
    let mut report = report();
    report.lines[1].1.gpu_seconds = 64 * 3600;
    report
}

/// All of them, for the fuzzer.
pub(crate) fn reports_of_usage() -> Vec<Bytes> {
    let reports = [report().encode(), report_with_gpus().encode()];
    let signed = SignedBytes { bytes: reports[0].clone(), signature: vec![1, 2, 3] };
    reports.into_iter().chain([signed.encode()]).map(Bytes::from).collect()
}

#[test]
fn reports_of_usage_stay_as_they_are() {
    for (file, report) in [("report", report()), ("report-with-gpus", report_with_gpus())] {
        let signed = SignedBytes { bytes: report.encode(), signature: vec![1, 2, 3] }.encode();
        if std::env::var_os("TOWLINE_GOLDEN_WRITE").is_some() {
            fs::write(golden(file), &signed).unwrap();
        }
        let stored = fs::read(golden(file)).unwrap();
        assert!(signed == stored, "the encoding of {file} changed");
        let read = SignedBytes::decode(&stored).unwrap();
        assert_eq!(UsageReport::decode(&read.bytes, u64::MAX).unwrap(), report);
    }
}
