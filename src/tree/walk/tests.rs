//! Bounds of a walk.

use super::*;
use crate::budget::Budget;
use crate::error::ErrorKind;
use crate::limits::MEMORY_MIN;

#[test]
fn ignore_files_above_each_other_are_few() {
    let root = tempfile::tempdir().unwrap();
    let (mut folder, rules) = (root.path().to_owned(), Rules::default());
    for depth in 1..=33 {
        std::fs::write(folder.join(IGNORE_FILE), "*.tmp").unwrap();
        let walked = walk(root.path(), &rules);
        assert_eq!(walked.is_ok(), depth <= 32, "{depth}: {walked:?}");
        folder.push("deeper");
        std::fs::create_dir(&folder).unwrap();
    }
    let error = walk(root.path(), &rules).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().starts_with("too many ignore files above each other"), "{error}");
    let unread = Rules { no_ignore_files: true, ..Rules::default() };
    walk(root.path(), &unread).unwrap();
}

/// Of a folder such files are told among those that are not saved; one that is named itself must not be.
#[test]
fn an_unfinished_file_is_not_saved_by_its_name() {
    let root = tempfile::tempdir().unwrap();
    let file = root.path().join(".towline-0123456789abcdef-0.part");
    std::fs::write(&file, "data").unwrap();
    assert_eq!(walk(&file, &Rules::default()).unwrap_err().kind(), ErrorKind::Usage);
    let walked = walk(root.path(), &Rules::default()).unwrap();
    assert_eq!((walked.found.len(), walked.skipped[0].reason), (1, SkipReason::Unfinished));
}

#[test]
fn a_stopped_walk_ends_and_entries_count_in_the_budget() {
    let root = tempfile::tempdir().unwrap();
    (0..100).for_each(|nth| std::fs::write(root.path().join(nth.to_string()), "").unwrap());
    let rules = Rules::default();
    rules.stop.cancel();
    assert_eq!(walk(root.path(), &rules).unwrap_err().kind(), ErrorKind::Cancelled);

    let budget = Budget::new(MEMORY_MIN).unwrap();
    let rules = Rules { memory: Some(budget.clone()), ..Rules::default() };
    let walked = walk(root.path(), &rules).unwrap();
    let mut others = budget.tree_memory(None);
    assert!(!others.try_add(others.max()), "the walk counts while it is there");
    while others.try_add(64 << 10) {}
    assert_eq!(walk(root.path(), &rules).unwrap_err().kind(), ErrorKind::Exhausted);
    drop((walked, others));
    assert!(budget.tree_memory(None).try_add(budget.total() / 2));
    // Names that are left out count while they are there, too.
    let rules = Rules { excludes: vec!["*".to_owned()], memory: Some(budget.clone()), ..Rules::default() };
    let mut others = budget.tree_memory(None);
    assert!(others.try_add(others.max() - (64 << 10)));
    assert_eq!(walk(root.path(), &rules).unwrap().found.len(), 1);
    (0..1000).for_each(|nth| std::fs::write(root.path().join(format!("{nth:0200}")), "").unwrap());
    assert_eq!(walk(root.path(), &rules).unwrap_err().kind(), ErrorKind::Exhausted);
    drop(others);
    let walked = walk(root.path(), &rules).unwrap();
    assert!(budget.tree_memory(None).try_add(budget.total() / 2), "a list of names is forgotten");
    drop(walked);
}

/// Only root can give files away.
#[test]
fn ignore_files_of_strangers_are_not_obeyed() {
    if !geteuid().is_root() {
        return;
    }
    let root = tempfile::tempdir().unwrap();
    let (ignore, file) = (root.path().join(IGNORE_FILE), root.path().join("weights"));
    std::fs::write(&ignore, "weights\n").unwrap();
    std::fs::write(&file, "weights").unwrap();
    let finds = || walk(root.path(), &Rules::default()).unwrap().found.iter().any(|found| found.path == b"weights");
    assert!(!finds());
    std::os::unix::fs::chown(&ignore, Some(1234), None).unwrap();
    assert!(finds());
    std::os::unix::fs::chown(root.path(), Some(1234), None).unwrap();
    assert!(!finds(), "the owner of the folder may leave out what is in it");
}
