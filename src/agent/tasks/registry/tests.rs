//! The registry of tasks.

use serde_json::{Value, json};

use super::*;
use crate::agent::tokens::Tokens;
use crate::agent::tokens::tests::granted;
use crate::clock::SystemClock;
use crate::error::ErrorKind;
use crate::identity::Identity;

fn report() -> TaskReport {
    TaskReport::Watch { saved: vec!["run/step-1".to_owned()] }
}

fn spec(name: &str) -> TaskSpec {
    TaskSpec { kind: TaskKind::Save, name: name.to_owned(), repository: None, caller: None }
}

fn agent_of(site: &str, agent: &str) -> Requester {
    Requester::Agent(Identity::new(site, agent).unwrap())
}

fn of_caller(name: &str, agent: &str) -> TaskSpec {
    TaskSpec { caller: Some(agent_of("cloud", agent)), ..spec(name) }
}

fn tasks() -> Tasks {
    Tasks::new(Arc::new(SystemClock))
}

#[tokio::test]
async fn each_end_is_told_and_counted() {
    let tasks = tasks();
    let done = tasks.begin(spec("done"), |progress| async move {
        progress.moved(7);
        Ok(report())
    });
    let failed = tasks.begin(spec("failed"), |_| async { Err(Error::conflict("no")) });
    let stopped = tasks.begin(spec("stopped"), |_| std::future::pending()).unwrap();
    let broken = tasks.begin(spec("broken"), |_| async { panic!("a bug, for the test") });
    assert!(stopped.is_running());
    stopped.stop();
    let all = [done.unwrap(), failed.unwrap(), stopped, broken.unwrap()];
    for task in &all {
        task.ended().await;
    }
    let views = all.each_ref().map(|task| task.view());
    assert_eq!(views[0].report, Some(json!({ "saved": ["run/step-1"] })));
    assert_eq!(views[1].error.as_ref().unwrap()["kind"], "conflict");
    let states = views.map(|view| view.state);
    assert_eq!(states, [TaskState::Done, TaskState::Failed, TaskState::Cancelled, TaskState::Failed]);
    let tally = tasks.counts(TaskKind::Save);
    assert_eq!((tally.running, tally.moved), (0, 7));
    assert_eq!(tally.ended.into_values().collect::<Vec<_>>(), [1, 2, 1]);
    assert_eq!(tasks.find(&all[0].id.to_string(), None).unwrap().id, all[0].id);
    assert_eq!(tasks.find("nobody", None).unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn what_hears_that_it_is_stopped_says_what_came_of_it() {
    let tasks = tasks();
    let hearing = tasks.begin_stoppable(spec("a"), |_, stop| async move {
        stop.cancelled().await;
        Err(Error::cancelled("3 MiB are stored"))
    });
    let hearing = hearing.unwrap();
    hearing.stop();
    hearing.ended().await;
    let view = hearing.view();
    assert_eq!((view.state, &view.error.unwrap()["message"]), (TaskState::Cancelled, &Value::from("3 MiB are stored")));
}

#[tokio::test]
async fn it_is_bounded_and_closes() {
    let tasks = tasks();
    let running: Vec<_> =
        (0..RUNNING_MAX).map(|_| tasks.begin(spec("a"), |_| std::future::pending()).unwrap()).collect();
    let refused = |tasks: &Tasks| tasks.begin(spec("b"), |_| std::future::pending()).unwrap_err();
    assert_eq!(refused(&tasks).kind(), ErrorKind::Exhausted);
    running.iter().for_each(|task| task.stop());
    tasks.close();
    tasks.ended().await;
    assert_eq!(refused(&tasks).kind(), ErrorKind::Unreachable);
}

#[tokio::test]
async fn the_oldest_that_ended_are_forgotten() {
    let tasks = tasks();
    let first = tasks.begin(spec("first"), |_| std::future::pending()).unwrap();
    for _ in 0..ENDED_KEPT + 5 {
        tasks.begin(spec("a"), |_| async { Ok(report()) }).unwrap().ended().await;
    }
    assert_eq!(tasks.list(None).tasks.len(), ENDED_KEPT + 1);
    assert!(tasks.find(&first.id.to_string(), None).is_ok(), "it runs");
}

#[tokio::test]
async fn other_agents_push_out_no_task_of_this_node() {
    let tasks = tasks();
    tasks.begin(spec("own"), |_| async { Ok(report()) }).unwrap().ended().await;
    for n in 0..ENDED_KEPT * 2 {
        let agent = format!("agent-{}", n % 8);
        tasks.begin(of_caller("a", &agent), |_| async { Err(Error::other("no")) }).unwrap().ended().await;
    }
    let list = tasks.list(None).tasks;
    assert_eq!((list[0].name.as_str(), list.len()), ("own", 1 + REMOTE_ENDED_KEPT));
    for _ in 0..CALLER_ENDED_KEPT + 5 {
        tasks.begin(of_caller("a", "agent-0"), |_| async { Ok(report()) }).unwrap().ended().await;
    }
    assert_eq!(tasks.list(Some(&agent_of("cloud", "agent-0"))).tasks.len(), CALLER_ENDED_KEPT);
}

#[tokio::test]
async fn failures_that_are_retried_have_their_kind() {
    let tasks = tasks();
    let spec = TaskSpec { kind: TaskKind::Watch, ..of_caller("run", "a") };
    let (say, said) = tokio::sync::oneshot::channel();
    let task = tasks.begin_lasting(spec, |_, failures, _| async move {
        failures.record("step-1", ErrorKind::Exhausted, "disk full: cannot write /srv/x".to_owned());
        let _ = say.send(());
        std::future::pending().await
    });
    said.await.unwrap();
    let error = task.unwrap().view_for(None).error.unwrap();
    assert_eq!((&error["kind"], &error["message"]), (&"exhausted".into(), &"disk full: cannot write /srv/x".into()));
    let of_caller = tasks.list(Some(&agent_of("cloud", "a"))).tasks;
    assert_eq!(of_caller[0].error.as_ref().unwrap()["message"], "disk full: cannot write (hidden)");
}

#[tokio::test]
async fn other_agents_see_their_own_and_leave_room() {
    let tasks = tasks();
    let agent = |agent: &str| Some(agent_of("home", agent));
    let begin = |caller: Option<Requester>| tasks.begin(TaskSpec { caller, ..spec("a") }, |_| std::future::pending());
    let (own, theirs) = (begin(None).unwrap(), begin(agent("a")).unwrap());
    let id = |task: &Task| task.id.to_string();
    assert!(tasks.find(&id(&own), agent("a").as_ref()).is_err());
    assert!(tasks.find(&id(&theirs), agent("b").as_ref()).is_err());
    assert_eq!(tasks.find(&id(&theirs), agent("a").as_ref()).unwrap().id, theirs.id);
    assert_eq!(tasks.list(agent("a").as_ref()).tasks.len(), 1);
    assert_eq!(tasks.list(agent("b").as_ref()).tasks.len(), 0);
    assert_eq!(tasks.list(None).tasks.len(), 2);
    // Each has at most half of what others leave; `a` has one already.
    let fill = |name: &str| (0..REMOTE_MAX).filter(|_| begin(agent(name)).is_ok()).count();
    assert_eq!(fill("b"), 16);
    let error = begin(agent("b")).unwrap_err();
    assert!(error.to_string().contains("too many tasks of home/b are running: expected at most 16"), "{error}");
    assert_eq!(["c", "d", "e", "f"].map(fill), [8, 4, 2, 1]);
    let error = begin(agent("b")).unwrap_err();
    assert!(error.to_string().contains("too many tasks of other agents and tokens are running: expected at most 32"));
    assert_eq!(error.kind(), ErrorKind::Exhausted);
    assert!(begin(None).is_ok());
}

#[tokio::test]
async fn tasks_of_a_token_stop_when_it_is_revoked() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tokens::open(&dir.path().join("tokens"), Arc::new(SystemClock)).unwrap();
    let [revoked, other] = [(); 2].map(|()| granted(&tokens, None, &["read=**"]));
    let tasks = tasks();
    let begin = |grant: &Arc<_>| {
        let spec = TaskSpec { caller: Some(Requester::Token(Arc::clone(grant))), ..spec("n") };
        let until_stopped = |_, stop: CancellationToken| async move {
            stop.cancelled().await;
            Err(Error::cancelled("interrupted"))
        };
        tasks.begin_stoppable(spec, until_stopped).unwrap()
    };
    let (ended, kept) = (begin(&revoked), begin(&other));
    tokens.revoke(&revoked.id().to_string()).unwrap();
    tasks.ended_of(&Requester::Token(revoked).path()).await;
    assert!(!ended.is_running());
    assert!(matches!(ended.ended().await, Outcome::Cancelled(_)));
    assert!(kept.is_running());
    kept.stop();
    kept.ended().await;
}

#[tokio::test]
async fn a_task_of_a_token_with_all_rights_has_ended_once_a_revocation_is_answered() {
    let dir = tempfile::tempdir().unwrap();
    let tokens = Tokens::open(&dir.path().join("tokens"), Arc::new(SystemClock)).unwrap();
    let [admin, other] = [(); 2].map(|()| granted(&tokens, None, &["admin"]));
    let tasks = tasks();
    let begin = |grant: &Arc<Grant>| {
        let until_stopped = |_, stop: CancellationToken| async move {
            stop.cancelled().await;
            Err(Error::cancelled("interrupted"))
        };
        let task = tasks.begin_stoppable(spec("a"), until_stopped).unwrap();
        task.stop_with(grant);
        task
    };
    let (ended, kept) = (begin(&admin), begin(&other));
    // It is the user's for everybody else.
    assert_eq!(ended.view().caller, None);
    let path = tokens.revoke(&admin.id().to_string()).unwrap();
    tasks.ended_of(&path).await;
    assert!(!ended.is_running() && kept.is_running());
    assert!(matches!(ended.ended().await, Outcome::Cancelled(_)));
    kept.stop();
    kept.ended().await;
}

#[tokio::test]
async fn tasks_of_the_tokens_of_a_tenant_are_limited_together_and_seen_apart() {
    let (tasks, dir) = (tasks(), tempfile::tempdir().unwrap());
    let tokens = Tokens::open(&dir.path().join("tokens"), Arc::new(SystemClock)).unwrap();
    let token = |tenant: &str| Requester::Token(granted(&tokens, Some(tenant), &["read=**"]));
    let begin = |caller: &Requester| {
        tasks.begin(TaskSpec { caller: Some(caller.clone()), ..spec("a") }, |_| std::future::pending())
    };
    let own = [(); 32].map(|()| token("team-a"));
    assert_eq!(own.iter().filter(|one| begin(one).is_ok()).count(), 16);
    let error = begin(&own[0]).unwrap_err();
    assert!(error.to_string().contains("too many tasks of token:team-a are running: expected at most 16"), "{error}");
    assert_eq!(tasks.list(Some(&own[0])).tasks.len(), 1);
    assert!(begin(&token("team-b")).is_ok());
    for task in tasks.running() {
        task.stop();
        task.ended().await;
    }
    // Ended tasks of a tenant are limited together, too.
    for one in &own {
        let task = begin(one).unwrap();
        task.stop();
        task.ended().await;
    }
    assert_eq!(tasks.list(None).tasks.len(), 1 + CALLER_ENDED_KEPT);
}
