//! Settings files that others may have planted.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::PathBuf;

use tempfile::TempDir;

use super::*;

/// A working folder below one that may hold a settings file, and a home folder.
struct Scene {
    top: TempDir,
    variables: BTreeMap<&'static str, OsString>,
}

impl Scene {
    fn new() -> Self {
        let top = tempfile::tempdir().unwrap();
        for folder in ["project/deep", "home"] {
            fs::create_dir_all(top.path().join(folder)).unwrap();
        }
        let home = top.path().join("home").into_os_string();
        Self { top, variables: BTreeMap::from([("HOME", home)]) }
    }

    fn file(&self) -> PathBuf {
        self.top.path().canonicalize().unwrap().join("project/towline.toml")
    }

    fn write(&self, text: &str) {
        fs::write(self.file(), text).unwrap();
    }

    fn settings(&self, flags: Flags) -> Result<Settings> {
        let folder = self.file().with_file_name("deep");
        Settings::resolve(flags, Surroundings { folder: &folder, variable: &|name| self.variables.get(name).cloned() })
    }

    fn trusted(&self) -> Trusted {
        Trusted::below(&self.top.path().join("home/.config/towline"))
    }
}

#[test]
fn a_planted_file_decides_nothing_until_it_is_trusted() {
    let scene = Scene::new();
    for (text, shown) in [
        ("repository = 's3://evil/x'", "repository = \"s3://evil/x\""),
        ("endpoint = 'https://evil'", "endpoint = \"https://evil\""),
        ("repository = 'near'\nendpoint = 'https://evil'", "repository = \"near\", endpoint = \"https://evil\""),
    ] {
        scene.write(text);
        let error = scene.settings(Flags::default()).unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Usage, scene.file().to_str()), "{error}");
        assert!(error.to_string().contains(shown), "{error}");
        let command = format!("towline config trust {}", scene.file().display());
        assert!(error.help_text().unwrap().contains(&command), "{:?}", error.help_text());
    }

    let recorded = scene.trusted().add(&scene.file()).unwrap();
    assert_eq!(recorded.path, scene.file());
    let settings = scene.settings(Flags::default()).unwrap();
    assert_eq!(settings.endpoint.as_deref(), Some("https://evil"));
    assert_eq!(settings.repository, scene.file().with_file_name("near").to_str().map(str::to_owned));

    // A changed file is not trusted; nor is the same file at another path.
    scene.write("repository = 'near'\nendpoint = 'https://evi1'");
    assert_eq!(scene.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
    scene.trusted().add(scene.file().parent().unwrap()).unwrap();
    scene.settings(Flags::default()).unwrap();
    fs::copy(scene.file(), scene.file().with_file_name("deep/towline.toml")).unwrap();
    assert_eq!(scene.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
    fs::remove_file(scene.file().with_file_name("deep/towline.toml")).unwrap();

    assert_eq!(scene.trusted().remove(&scene.file()).unwrap(), scene.file());
    assert_eq!(scene.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
    assert_eq!(scene.trusted().remove(&scene.file()).unwrap_err().kind(), ErrorKind::NotFound);
}

#[test]
fn what_flags_and_variables_say_needs_no_trust() {
    let mut scene = Scene::new();
    scene.write("repository = 's3://evil/x'\nmemory = '64M'");
    let flags = Flags { repository: Some("/flag".into()), ..Flags::default() };
    let settings = scene.settings(flags.clone()).unwrap();
    assert_eq!((settings.repository.as_deref(), settings.memory), (Some("/flag"), Some(64 << 20)));
    // The endpoint is another decision.
    scene.write("repository = 's3://evil/x'\nendpoint = 'https://evil'");
    assert!(scene.settings(flags.clone()).unwrap_err().to_string().contains("https://evil"));
    scene.variables.insert("AWS_ENDPOINT_URL", "https://mine".into());
    scene.settings(flags).unwrap();
    scene.write("memory = '64M'");
    scene.variables.clear();
    assert_eq!(scene.settings(Flags::default()).unwrap().memory, Some(64 << 20));
}

#[test]
fn a_planted_file_lowers_the_memory_and_does_not_raise_it() {
    let mut scene = Scene::new();
    let memory = |scene: &Scene, flags: Flags| scene.settings(flags).unwrap().memory;
    scene.write("memory = '64M'");
    assert_eq!(memory(&scene, Flags::default()), Some(64 << 20));
    scene.write("memory = '1T'");
    assert_eq!(memory(&scene, Flags::default()), None, "the default");
    assert_eq!(memory(&scene, Flags { memory: Some(2 << 40), ..Flags::default() }), Some(2 << 40));
    scene.trusted().add(&scene.file()).unwrap();
    assert_eq!(memory(&scene, Flags::default()), Some(1 << 40));
    // Nor where nothing can be trusted; the user's own file may say anything.
    scene.trusted().remove(&scene.file()).unwrap();
    let home = scene.variables.remove("HOME").unwrap();
    assert_eq!(memory(&scene, Flags::default()), None);
    scene.variables.insert("HOME", home);
    let own = scene.top.path().join("home/.config/towline/towline.toml");
    fs::rename(scene.file(), own).unwrap();
    assert_eq!(memory(&scene, Flags::default()), Some(1 << 40));
}

#[test]
fn plain_http_is_never_allowed_by_a_file_of_a_folder() {
    let mut scene = Scene::new();
    scene.write("allow_http = true");
    scene.trusted().add(&scene.file()).unwrap();
    let error = scene.settings(Flags::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.help_text().unwrap().contains("TOWLINE_ALLOW_HTTP=1"));
    let flags = Flags { allow_http: true, ..Flags::default() };
    assert!(scene.settings(flags).unwrap().allow_http);
    scene.variables.insert("TOWLINE_ALLOW_HTTP", "1".into());
    assert!(scene.settings(Flags::default()).unwrap().allow_http);
    scene.variables.insert("TOWLINE_ALLOW_HTTP", "perhaps".into());
    assert_eq!(scene.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Usage);
}

#[test]
fn what_others_may_write_is_refused_trusted_or_not() {
    let scene = Scene::new();
    scene.write("repository = 'near'");
    scene.trusted().add(&scene.file()).unwrap();
    let own = scene.top.path().join("home/.config/towline/towline.toml");
    fs::write(&own, "repository = '/own'").unwrap();
    for file in [scene.file(), own] {
        fs::set_permissions(&file, Permissions::from_mode(0o664)).unwrap();
        let error = scene.settings(Flags::default()).unwrap_err();
        assert_eq!((error.kind(), error.place()), (ErrorKind::Denied, file.to_str()), "{error}");
        // It keeps nobody from working who says where to.
        let flags = Flags { repository: Some("/flag".into()), ..Flags::default() };
        assert_eq!(scene.settings(flags).unwrap().repository.as_deref(), Some("/flag"));
        fs::remove_file(&file).unwrap();
    }
}

#[test]
fn records_are_the_users_own() {
    let scene = Scene::new();
    scene.write("repository = 'near'");
    scene.trusted().add(&scene.file()).unwrap();
    let folder = scene.top.path().join("home/.config/towline/trusted");
    assert_eq!(fs::metadata(&folder).unwrap().mode() & 0o777, 0o700);
    let records: Vec<PathBuf> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    let [record] = records.as_slice() else { panic!("{records:?}") };
    assert_eq!(fs::metadata(record).unwrap().mode() & 0o777, 0o600);
    fs::set_permissions(record, Permissions::from_mode(0o666)).unwrap();
    assert_eq!(scene.settings(Flags::default()).unwrap_err().kind(), ErrorKind::Denied);
}

#[test]
fn a_command_to_paste_is_one_word_whatever_the_folder_is_called() {
    assert_eq!(trust::command(Path::new("/a/towline.toml")), "towline config trust /a/towline.toml");
    let command = trust::command(Path::new("/a b/$(rm)/it's/towline.toml"));
    assert_eq!(command, r"towline config trust '/a b/$(rm)/it'\''s/towline.toml'");
}
