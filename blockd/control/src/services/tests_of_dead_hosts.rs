//! A host that is gone, with the cells that it had, on a simulated array.

use std::path::PathBuf;

use blockd_api::v1;
use blockd_hosts::simulated::Array;
use blockd_hosts::{CellName, Coordinator as _, Fence as _, Holder, HostNumber, Key};
use blockd_mapper::error::MapperError;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tonic::Status;

use super::dead_hosts::Steps;
use super::testing::{Folder, Rig, folder, folder_on_disk};

const GROUP: &str = "san";
/// The host that is gone.
const GONE: HostNumber = HostNumber(1);
/// The host that deals with it.
const THIS: HostNumber = HostNumber(2);
const THIRD: HostNumber = HostNumber(3);
const OTHER_NODE: &str = "4f2b8c1d-0e4a-4d5b-9c6f-7a8b9c0d1e2f";

struct Hosts {
    array: Array,
    gone: Rig,
    this: Rig,
    key: Key,
    _folder: Folder,
}

/// The end of a call, and its steps before.
type Ended = (Result<v1::HostEnd, Status>, Vec<v1::HostCell>);

impl Hosts {
    /// A host with these cells has died. Its daemon does not answer where it should.
    async fn with(cells: &[&str]) -> Self {
        let place = folder_on_disk();
        let array = Array::new(place.path().to_owned(), 1024 << 20);
        let mut gone = Rig::without_pool(folder()).await;
        let mut this = Rig::of_other_node(OTHER_NODE).await;
        for (rig, host) in [(&mut gone, GONE), (&mut this, THIS)] {
            rig.control.0.groups.add_simulated(GROUP, array.member(host));
            let request =
                v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
            rig.client.add_volume_group(request).await.unwrap();
        }
        let key = array.member(GONE).keys().unwrap();
        let key = key.into_iter().find(|key| key.host() == GONE).unwrap();
        let mut hosts = Self { array, gone, this, key, _folder: place };
        for cell in cells {
            hosts.create(cell).await;
        }
        hosts.publish(&silent().await);
        hosts
    }

    /// The host that dies makes a cell with a volume, which it does not close.
    async fn create(&mut self, cell: &str) {
        let request = v1::CreateCellRequest {
            group: GROUP.to_owned(),
            name: cell.to_owned(),
            device_bytes: 64 << 20,
            extent_size: 64 << 10,
            only_begun: false,
        };
        self.gone.client.create_cell(request).await.unwrap();
        let request = v1::CreateVolumeRequest {
            pool: cell.to_owned(),
            name: "v".to_owned(),
            size_bytes: 1 << 20,
            ..Default::default()
        };
        self.gone.client.create_volume(request).await.unwrap();
        let handle = self.gone.control.pool(cell).unwrap();
        let problem = "the host has died".to_owned();
        handle.halt(MapperError::Device { name: "host".to_owned(), problem });
        handle.abandon().await;
    }

    fn publish(&self, address: &str) {
        self.array.member(GONE).publish_address(GONE, address).unwrap();
    }

    /// The host was switched on, has joined with another key, and has taken a cell, if any.
    fn come_back(array: &Array, cell: Option<&str>, incarnation: u32) {
        array.boot(GONE);
        let member = array.member(GONE);
        let key = Key::new(GONE, incarnation);
        let former: Vec<_> =
            member.keys().unwrap().into_iter().filter(|key| key.host() == GONE).collect();
        member.join(key, &former, true).unwrap();
        member.publish_key(key).unwrap();
        if let Some(cell) = cell {
            let cell = CellName::parse(cell).unwrap();
            let owner = array.member(THIS).cell(&cell).unwrap().unwrap().holder;
            if let Holder::Other(owner) = owner {
                member.free(&cell, owner).unwrap();
            }
            member.acquire(&cell).unwrap();
        }
    }

    async fn declare(&self, force: bool) -> Ended {
        let (send, mut receive) = mpsc::unbounded_channel();
        let asked =
            v1::DeclareHostDeadRequest { group: GROUP.to_owned(), host: u32::from(GONE.0), force };
        let ended = self.this.control.declare_host_dead(&asked, &Steps::new(send)).await;
        receive.close();
        let mut cells = Vec::new();
        while let Some(step) = receive.recv().await {
            cells.extend(step.unwrap().cell);
        }
        (ended.map_err(|error| error.to_status()), cells)
    }

    async fn forget(&self, force: bool) -> Result<v1::HostEnd, Status> {
        let (send, _receive) = mpsc::unbounded_channel();
        let host = u32::from(GONE.0);
        let asked = v1::ForgetHostRequest { group: GROUP.to_owned(), host, force };
        let ended = self.this.control.forget_host(&asked, &Steps::new(send)).await;
        ended.map_err(|error| error.to_status())
    }

    async fn group(&mut self) -> v1::VolumeGroup {
        let request = v1::ListVolumeGroupsRequest { name: GROUP.to_owned(), ..Default::default() };
        let listed = self.this.client.list_volume_groups(request).await.unwrap().into_inner();
        listed.groups.into_iter().next().unwrap()
    }

    fn has_key(&self) -> bool {
        self.array.member(GONE).is_member(self.key).unwrap()
    }

    /// The steps on the array since the first fence, with no repetitions.
    fn steps(&self) -> Vec<String> {
        let steps = self.array.steps();
        let mut steps: Vec<_> =
            steps.into_iter().skip_while(|step| !step.starts_with("fence")).collect();
        steps.dedup();
        steps
    }

    fn hook(&self, folder: &str, text: &str) -> PathBuf {
        let folder = self.this.folder.path().join("hooks").join(folder);
        std::fs::create_dir_all(&folder).unwrap();
        let path = folder.join("50-hook");
        // By another process: the children of other tests would have the file open for writing.
        let write = "printf '#!/bin/sh\\n%s\\n' \"$TEXT\" > \"$FILE\" && chmod 755 \"$FILE\"";
        let mut shell = std::process::Command::new("sh");
        shell.args(["-c", write]).env("TEXT", text).env("FILE", &path);
        assert!(shell.status().unwrap().success());
        path
    }

    async fn take_by_fence(&self, cell: &str) -> Result<v1::TakeCellResponse, Status> {
        let (group, name) = (GROUP.to_owned(), cell.to_owned());
        let taking = v1::TakeCellRequest { group, name, fence: true, ..Default::default() };
        let taken = self.this.client.clone().take_cell(taking).await;
        taken.map(tonic::Response::into_inner)
    }

    /// The holder of a cell, as the host that deals with the dead one sees it.
    fn holder(&self, cell: &str) -> Holder {
        let cell = CellName::parse(cell).unwrap();
        self.array.member(THIS).cell(&cell).unwrap().unwrap().holder
    }

    /// Takes a cell as any host does, without a fence: it has to be free and closed.
    async fn take(&mut self, cell: &str) -> Vec<String> {
        let (group, name) = (GROUP.to_owned(), cell.to_owned());
        let taking = v1::TakeCellRequest { group, name, ..Default::default() };
        self.this.client.take_cell(taking).await.unwrap();
        let request = v1::ListVolumesRequest { pool: cell.to_owned(), ..Default::default() };
        let listed = self.this.client.list_volumes(request).await.unwrap().into_inner();
        listed.volumes.into_iter().map(|volume| volume.name).collect()
    }
}

/// An address at which nothing answers.
async fn silent() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    listener.local_addr().unwrap().to_string()
}

fn outcomes(cells: &[v1::HostCell]) -> Vec<(&str, v1::HostCellOutcome)> {
    cells.iter().map(|cell| (cell.name.as_str(), cell.outcome())).collect()
}

use v1::HostCellOutcome::{Elsewhere, Failed, Kept, Released};

#[tokio::test]
async fn a_dead_host_is_fenced_before_its_cells_are_taken_closed_and_released() {
    let mut hosts = Hosts::with(&["one", "two"]).await;
    let (ended, cells) = hosts.declare(false).await;
    assert!(ended.unwrap().changed);
    assert_eq!(outcomes(&cells), [("one", Released), ("two", Released)]);
    assert!(cells.iter().all(|cell| cell.log_changes > 0), "{cells:?}");
    let expected = [
        "fence 1",
        "free one",
        "take one",
        "release one",
        "fence 1",
        "free two",
        "take two",
        "release two",
    ];
    assert_eq!(hosts.steps(), expected);
    assert!(!hosts.has_key());
    let dead = hosts.group().await.dead.remove(0);
    assert_eq!((dead.host, dead.cells), (1, vec!["one".to_owned(), "two".to_owned()]));
    assert!(dead.pending_cells.is_empty() && dead.dead_unix_ms > 0);
    let nodes = hosts.this.control.describe_nodes().await.unwrap();
    let node = nodes.iter().find(|node| node.id == "san/1").unwrap();
    assert_eq!((node.state(), node.pools.len()), (v1::NodeState::Dead, 2));
    // Nothing is done again.
    let before = hosts.array.steps();
    let (ended, cells) = hosts.declare(false).await;
    let end = ended.unwrap();
    assert!(!end.changed && cells.is_empty());
    assert_eq!(end.dead.unwrap().cells.len(), 2);
    assert_eq!(hosts.array.steps(), before);
    // They were closed in order.
    for cell in ["one", "two"] {
        assert_eq!(hosts.take(cell).await, ["v"]);
    }
}

#[tokio::test]
async fn a_host_that_may_be_alive_is_fenced_by_force_alone() {
    let hosts = Hosts::with(&["one"]).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap().to_string();
    // No published address says nothing of death, and neither does a name that nothing resolves.
    for (place, problem) in [
        (address.as_str(), "answers: its address is"),
        ("", "has published no address"),
        ("no-such-host.invalid:7", "can't be tried"),
    ] {
        hosts.publish(place);
        let (ended, cells) = hosts.declare(false).await;
        let error = ended.unwrap_err();
        assert!(error.message().contains(problem), "{error}");
        assert!(cells.is_empty() && hosts.has_key() && hosts.steps().is_empty());
    }
    hosts.publish(&address);
    let (ended, cells) = hosts.declare(true).await;
    assert!(ended.unwrap().changed && !hosts.has_key());
    assert_eq!(outcomes(&cells), [("one", Released)]);
}

#[tokio::test]
async fn hosts_that_can_not_be_are_refused() {
    let hosts = Hosts::with(&[]).await;
    for (host, problem) in [
        (0, "from 1 to 2000"),
        (2001, "from 1 to 2000"),
        (u32::from(THIS.0), "this one runs, and can't be declared dead"),
        (7, "host san/7 does not exist"),
    ] {
        let (send, _receive) = mpsc::unbounded_channel();
        let asked = v1::DeclareHostDeadRequest { group: GROUP.to_owned(), host, force: true };
        let ended = hosts.this.control.declare_host_dead(&asked, &Steps::new(send)).await;
        let error = ended.unwrap_err().to_string();
        assert!(error.contains(problem), "{error}");
    }
}

#[tokio::test]
async fn a_script_that_fails_ends_it_with_nothing_changed() {
    let mut hosts = Hosts::with(&["one"]).await;
    let hook = hosts.hook("pre-declare-dead.d", "echo \"$1 $BLOCKD_POOLS\"; exit 3");
    let (ended, cells) = hosts.declare(false).await;
    let error = ended.unwrap_err();
    assert!(error.message().contains("ended with exit code 3: san/1 one"), "{error}");
    assert!(cells.is_empty() && hosts.has_key() && hosts.steps().is_empty());
    assert!(hosts.group().await.dead.is_empty());
    std::fs::remove_file(hook).unwrap();
    hosts.declare(false).await.0.unwrap();
    hosts.hook("pre-forget.d", "exit 4");
    let error = hosts.forget(false).await.unwrap_err();
    assert!(error.message().contains("exit code 4"), "{error}");
    assert_eq!(hosts.group().await.dead.len(), 1);
    assert!(hosts.array.member(THIS).keys().unwrap().contains(&hosts.key));
}

#[tokio::test]
async fn a_host_that_comes_back_while_scripts_run_is_not_fenced() {
    for force in [false, true] {
        comes_back_while_scripts_run(force).await;
    }
}

async fn comes_back_while_scripts_run(force: bool) {
    let hosts = Hosts::with(&["one"]).await;
    let ran = hosts.this.folder.path().join("ran");
    let go = hosts.this.folder.path().join("go");
    let wait = format!("touch {ran:?}; while ! test -e {go:?}; do sleep 0.01; done");
    hosts.hook("pre-declare-dead.d", &wait);
    let back = async {
        while !ran.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        Hosts::come_back(&hosts.array, Some("one"), 77);
        std::fs::write(&go, "").unwrap();
    };
    // Force fences a host that answers, and no other incarnation of it.
    let ((ended, cells), ()) = tokio::join!(hosts.declare(force), back);
    let error = ended.unwrap_err();
    assert!(error.message().contains("has come back meanwhile"), "{error}");
    assert!(cells.is_empty() && hosts.steps().is_empty());
    assert!(hosts.array.member(GONE).is_member(Key::new(GONE, 77)).unwrap());
}

#[tokio::test]
async fn a_cell_that_another_host_has_by_then_is_left_alone_and_that_host_is_not_fenced() {
    let mut hosts = Hosts::with(&["one", "two"]).await;
    let third = Key::new(THIRD, 9);
    hosts.array.member(THIRD).join(third, &[], true).unwrap();
    hosts.array.member(THIRD).publish_key(third).unwrap();
    let array = hosts.array.clone();
    // Once the first cell is released, another host takes the second one over.
    hosts.array.before("release one", move || {
        let two = CellName::parse("two").unwrap();
        let owner = array.member(THIS).cell(&two).unwrap().unwrap().holder;
        let Holder::Other(owner) = owner else { panic!("{owner:?}") };
        array.member(THIRD).free(&two, owner).unwrap();
        array.member(THIRD).acquire(&two).unwrap();
        true
    });
    let (ended, cells) = hosts.declare(false).await;
    assert!(ended.unwrap().changed);
    assert_eq!(outcomes(&cells), [("one", Released), ("two", Elsewhere)]);
    assert!(hosts.array.member(THIRD).is_member(third).unwrap());
    assert_eq!(hosts.group().await.dead[0].cells, ["one"]);
    // Also where that is asked of a single cell.
    let (group, name) = (GROUP.to_owned(), "two".to_owned());
    let taking =
        v1::TakeCellRequest { group, name, fence: true, only_from: 1, ..Default::default() };
    let error = hosts.this.client.take_cell(taking).await.unwrap_err();
    assert!(error.message().contains("is held by host 3, not by host 1"), "{error}");
    assert!(hosts.array.member(THIRD).is_member(third).unwrap());
}

#[tokio::test]
async fn a_lease_that_another_host_takes_first_is_not_waited_for() {
    let mut hosts = Hosts::with(&["one"]).await;
    let third = Key::new(THIRD, 9);
    hosts.array.member(THIRD).join(third, &[], true).unwrap();
    hosts.array.member(THIRD).publish_key(third).unwrap();
    let (array, one) = (hosts.array.clone(), CellName::parse("one").unwrap());
    let name = one.clone();
    let change = move || {
        let owner = array.member(THIS).cell(&name).unwrap().unwrap().holder;
        let Holder::Other(owner) = owner else { panic!("{owner:?}") };
        array.member(THIRD).free(&name, owner).unwrap();
        array.member(THIRD).acquire(&name).unwrap();
        true
    };
    hosts.array.before("free one", change);
    let (group, name) = (GROUP.to_owned(), "one".to_owned());
    let taking = v1::TakeCellRequest { group, name, fence: true, ..Default::default() };
    let error = hosts.this.client.take_cell(taking).await.unwrap_err();
    assert!(error.message().contains("is held by host 3"), "{error}");
    assert!(hosts.array.member(THIRD).is_member(third).unwrap());
}

#[tokio::test]
async fn a_call_that_was_interrupted_goes_on_without_the_scripts() {
    // At each step: the daemon ends, as far as its call is concerned.
    for step in ["free one", "take one", "release one"] {
        let mut hosts = Hosts::with(&["one", "two"]).await;
        hosts.array.before(step, || false);
        let (ended, cells) = hosts.declare(false).await;
        let error = ended.unwrap_err();
        assert!(error.message().contains("1 of its 2 cell(s) could not be taken over"), "{error}");
        // One that fails does not hold the others up.
        assert_eq!(outcomes(&cells), [("one", Failed), ("two", Released)], "{step}");
        assert!(cells[0].failure.contains("was made to fail"), "{cells:?}");
        let dead = hosts.group().await.dead.remove(0);
        assert_eq!((dead.cells, dead.pending_cells), (vec!["two".into()], vec!["one".into()]));
        hosts.hook("pre-declare-dead.d", "exit 1");
        let error = hosts.forget(false).await.unwrap_err();
        assert!(error.message().contains("has cells that were not taken over"), "{error}");
        let (ended, cells) = hosts.declare(false).await;
        assert!(ended.unwrap().changed);
        assert_eq!(outcomes(&cells), [("one", Released)], "{step}");
        assert_eq!(hosts.group().await.dead[0].cells, ["one", "two"]);
        assert!(!hosts.declare(false).await.0.unwrap().changed);
        assert_eq!(hosts.take("one").await, ["v"], "{step}");
    }
}

#[tokio::test]
async fn a_host_that_came_back_after_an_interrupted_call_is_left_alone() {
    let hosts = Hosts::with(&["one"]).await;
    hosts.array.before("take one", || false);
    hosts.declare(false).await.0.unwrap_err();
    let one = CellName::parse("one").unwrap();
    let holder = || hosts.array.member(THIS).cell(&one).unwrap().unwrap().holder;
    assert_eq!(holder(), Holder::Free);
    // It joins while the next call takes the lease that the first one has ended.
    let array = hosts.array.clone();
    hosts.array.before("take one", move || {
        Hosts::come_back(&array, None, 77);
        true
    });
    let (ended, cells) = hosts.declare(false).await;
    assert!(ended.is_err() && cells[0].failure.contains("has come back meanwhile"), "{cells:?}");
    assert!(hosts.array.member(GONE).is_member(Key::new(GONE, 77)).unwrap());
    assert_eq!(holder(), Holder::Free);
}

#[tokio::test]
async fn a_cell_that_the_dead_host_was_making_can_be_made_anew() {
    // The first call ends before this step.
    for step in ["none", "free half", "take half", "release half"] {
        let mut hosts = Hosts::with(&[]).await;
        hosts.array.member(GONE).create(&CellName::parse("half").unwrap(), 64 << 20).unwrap();
        hosts.array.before(step, || false);
        if step != "none" {
            hosts.declare(false).await.0.unwrap_err();
        }
        let (ended, cells) = hosts.declare(false).await;
        assert!(ended.is_ok() && outcomes(&cells) == [("half", Released)], "{step}: {cells:?}");
        let request = v1::CreateCellRequest {
            group: GROUP.to_owned(),
            name: "half".to_owned(),
            device_bytes: 64 << 20,
            extent_size: 64 << 10,
            only_begun: false,
        };
        assert!(hosts.this.client.create_cell(request).await.unwrap().into_inner().changed);
    }
}

#[tokio::test]
async fn a_host_that_was_declared_dead_sees_that_and_joins_again_after_a_boot() {
    let mut hosts = Hosts::with(&["one"]).await;
    hosts.declare(false).await.0.unwrap();
    let control = hosts.gone.control.clone();
    control.watch_groups().await;
    let failure = control.describe_groups(GROUP).await.unwrap().remove(0).failure;
    assert!(failure.contains("this host was fenced"), "{failure}");
    hosts.array.boot(GONE);
    let group = control.group(GROUP).unwrap();
    control.0.groups.change(&group, |member| member.forget_boot()).unwrap();
    for known in control.known_pools() {
        control.forget_pool(&known.config.name).await.unwrap();
    }
    let request = v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
    let joined = hosts.gone.client.add_volume_group(request).await.unwrap().into_inner();
    assert_eq!(joined.group.unwrap().failure, "");
    assert!(hosts.group().await.dead.is_empty());
    let (group, name) = (GROUP.to_owned(), "one".to_owned());
    let taking = v1::TakeCellRequest { group, name, ..Default::default() };
    assert!(hosts.gone.client.take_cell(taking).await.unwrap().into_inner().changed);
}

#[tokio::test]
async fn a_cell_of_a_dead_host_that_has_no_pool_is_freed() {
    let hosts = Hosts::with(&[]).await;
    let (member, name) = (hosts.array.member(GONE), CellName::parse("one").unwrap());
    let cell = member.create(&name, 64 << 20).unwrap();
    member.finish(&name).unwrap();
    super::tests_of_begun::write_claim(&cell.path);
    let (ended, cells) = hosts.declare(true).await;
    assert!(ended.unwrap().changed);
    assert_eq!(cells[0].outcome(), v1::HostCellOutcome::Released);
    assert_eq!(hosts.holder("one"), Holder::Free);
    let group = hosts.this.control.group(GROUP).unwrap();
    assert!(group.member().taking(&name).is_none());
    assert!(!hosts.declare(true).await.0.unwrap().changed);
}

#[tokio::test]
async fn a_host_that_comes_back_again_and_again_is_not_fenced_for_ever() {
    let hosts = Hosts::with(&["one"]).await;
    // It comes back between each fence and what follows. The first fence is of the key that it had.
    hosts.array.before("fence 1", || true);
    for incarnation in 0..9 {
        let array = hosts.array.clone();
        let back = move || {
            Hosts::come_back(&array, None, 100 + incarnation);
            true
        };
        hosts.array.before(if incarnation == 0 { "take one" } else { "fence 1" }, back);
    }
    let error = hosts.take_by_fence("one").await.unwrap_err();
    assert!(error.message().contains("has come back meanwhile"), "{error}");
    let fences = hosts.array.steps().iter().filter(|step| *step == "fence 1").count();
    assert_eq!(fences, 2);
    assert_eq!(hosts.holder("one"), Holder::Free);
}

#[tokio::test]
async fn a_host_that_has_come_back_since_its_key_was_looked_at_keeps_its_cell() {
    // Where this host has fenced it before, for another cell, it may end its leases.
    for was_fenced in [false, true] {
        let hosts = Hosts::with(&["one", "two"]).await;
        if was_fenced {
            hosts.take_by_fence("two").await.unwrap();
        }
        let array = hosts.array.clone();
        // Between the look at the keys and that at the lease.
        hosts.array.before("cells", move || {
            Hosts::come_back(&array, Some("one"), 77);
            true
        });
        let error = hosts.take_by_fence("one").await.unwrap_err();
        assert!(error.message().contains("has come back meanwhile"), "{was_fenced}: {error}");
        assert!(matches!(hosts.holder("one"), Holder::Other(owner) if owner.host == GONE));
        let is_member = hosts.array.member(GONE).is_member(Key::new(GONE, 77)).unwrap();
        assert!(is_member, "{was_fenced}: a host that is back was fenced");
        let group = hosts.this.control.group(GROUP).unwrap();
        assert_eq!(group.member().taking(&CellName::parse("one").unwrap()), None);
    }
}

#[tokio::test]
async fn a_takeover_that_ends_behind_the_lease_goes_on_with_the_next_call() {
    for is_back in [false, true] {
        let mut hosts = Hosts::with(&["one"]).await;
        let array = hosts.array.clone();
        hosts.array.before("take one", move || {
            array.before("keys", || false);
            true
        });
        let error = hosts.take_by_fence("one").await.unwrap_err();
        assert!(error.message().contains("was made to fail"), "{error}");
        assert_eq!(hosts.holder("one"), Holder::This);
        if !is_back {
            assert_eq!(hosts.take("one").await, ["v"]);
            continue;
        }
        // Nothing of it was changed: it is left to its host.
        Hosts::come_back(&hosts.array, None, 77);
        let (group, name) = (GROUP.to_owned(), "one".to_owned());
        let taking = v1::TakeCellRequest { group, name, ..Default::default() };
        let error = hosts.this.client.take_cell(taking).await.unwrap_err();
        assert!(error.message().contains("has come back meanwhile"), "{error}");
        assert_eq!(hosts.holder("one"), Holder::Free);
        let group = hosts.this.control.group(GROUP).unwrap();
        assert_eq!(group.member().taking(&CellName::parse("one").unwrap()), None);
    }
}

#[tokio::test]
async fn a_host_that_another_one_forgets_meanwhile_has_not_come_back() {
    for step in ["free one", "take one"] {
        for goes_on in [false, true] {
            let mut hosts = Hosts::with(&["one"]).await;
            let (array, key) = (hosts.array.clone(), hosts.key);
            hosts.array.before(step, move || {
                array.member(THIS).forget_host(GONE, Some(key)).unwrap();
                goes_on
            });
            let (ended, _) = hosts.declare(false).await;
            assert_eq!(ended.is_ok(), goes_on, "{step}: {ended:?}");
            if !goes_on {
                let (ended, cells) = hosts.declare(false).await;
                assert!(ended.is_ok() && outcomes(&cells) == [("one", Released)], "{cells:?}");
            }
            assert_eq!(hosts.take("one").await, ["v"]);
        }
    }
}

#[tokio::test]
async fn a_host_that_is_back_is_not_fenced_where_its_lease_was_not_overwritten() {
    let hosts = Hosts::with(&["one"]).await;
    // Another host was first to fence it, so its lease is waited for.
    let third = Key::new(THIRD, 9);
    let member = hosts.array.member(THIRD);
    member.join(third, &[], true).unwrap();
    assert!(member.fence(third, hosts.key).unwrap());
    let array = hosts.array.clone();
    hosts.array.before("take one", move || {
        Hosts::come_back(&array, None, 77);
        true
    });
    let error = hosts.take_by_fence("one").await.unwrap_err();
    assert!(error.message().contains("has come back meanwhile"), "{error}");
    assert!(
        hosts.array.member(GONE).is_member(Key::new(GONE, 77)).unwrap(),
        "a host that is back was fenced"
    );
    assert_eq!(hosts.holder("one"), Holder::Free);
}

#[tokio::test]
async fn a_host_without_cells_is_fenced_and_one_that_came_back_is_dead_no_more() {
    let mut hosts = Hosts::with(&[]).await;
    assert!(hosts.declare(false).await.0.unwrap().changed);
    assert!(!hosts.has_key());
    assert_eq!(hosts.group().await.dead.len(), 1);
    Hosts::come_back(&hosts.array, None, 77);
    let error = hosts.forget(false).await.unwrap_err();
    assert!(error.message().contains("or has come back since"), "{error}");
    let back = Key::new(GONE, 77);
    assert!(hosts.array.member(GONE).is_member(back).unwrap(), "a host that is back was fenced");
    assert!(hosts.group().await.dead.is_empty());
    assert!(hosts.this.control.describe_nodes().await.unwrap().iter().all(|n| n.id != "san/1"));
    // A second death is one record.
    assert!(hosts.declare(false).await.0.unwrap().changed);
    assert!(!hosts.array.member(GONE).is_member(back).unwrap());
    assert_eq!(hosts.group().await.dead.len(), 1);
}

#[tokio::test]
async fn a_forgotten_host_leaves_neither_key_nor_address() {
    let mut hosts = Hosts::with(&["one"]).await;
    let error = hosts.forget(false).await.unwrap_err();
    assert!(error.message().contains("was not declared dead"), "{error}");
    assert!(hosts.has_key());
    hosts.declare(false).await.0.unwrap();
    assert!(hosts.forget(false).await.unwrap().changed);
    let member = hosts.array.member(THIS);
    assert!(member.keys().unwrap().iter().all(|key| key.host() != GONE));
    assert_eq!(member.address_of(GONE).unwrap(), None);
    assert!(hosts.group().await.dead.is_empty());
    assert!(!hosts.forget(false).await.unwrap().changed);
    // By force also one that was not declared dead, with its cells.
    let mut hosts = Hosts::with(&["one"]).await;
    let end = hosts.forget(true).await.unwrap();
    assert!(end.changed && end.dead.is_none() && !hosts.has_key());
    assert_eq!(hosts.take("one").await, ["v"]);
}

#[tokio::test]
async fn a_host_that_was_forgotten_publishes_its_address_when_it_joins_again() {
    let mut hosts = Hosts::with(&[]).await;
    let address = "127.0.0.1:7";
    hosts.gone = Rig::at(address).await;
    hosts.gone.control.0.groups.add_simulated(GROUP, hosts.array.member(GONE));
    let request = v1::AddVolumeGroupRequest { name: GROUP.to_owned(), ..Default::default() };
    hosts.gone.client.add_volume_group(request.clone()).await.unwrap();
    let published = || hosts.array.member(THIS).address_of(GONE).unwrap();
    assert_eq!(published().as_deref(), Some(address));
    hosts.declare(true).await.0.unwrap();
    hosts.forget(false).await.unwrap();
    assert_eq!(published(), None);
    hosts.array.boot(GONE);
    let control = &hosts.gone.control;
    let group = control.group(GROUP).unwrap();
    control.0.groups.change(&group, |member| member.forget_boot()).unwrap();
    hosts.gone.client.clone().add_volume_group(request).await.unwrap();
    assert_eq!(published().as_deref(), Some(address));
}

#[tokio::test]
async fn a_second_daemon_with_the_same_number_in_a_folder_uses_no_cells() {
    let (cells, copy) = (folder_on_disk(), folder());
    let mut first = Rig::without_pool(folder()).await;
    let request = v1::AddVolumeGroupRequest {
        name: "local".to_owned(),
        folder: cells.path().display().to_string(),
        host: 1,
    };
    first.client.add_volume_group(request).await.unwrap();
    // It has the same state, as a container that was started twice.
    let file = "groups.json";
    std::fs::copy(first.folder.path().join(file), copy.path().join(file)).unwrap();
    let second = Rig::without_pool(copy).await;
    second.control.start_groups().await.unwrap();
    let refusal = |rig: &Rig| rig.control.group("local").unwrap().refusal();
    assert_eq!(refusal(&first), None);
    let refused = refusal(&second).unwrap_or_default();
    assert!(refused.contains("number is not taken in volume group local"), "{refused}");
}

#[tokio::test]
async fn forgetting_removes_no_key_of_a_host_that_came_back_during_the_scripts() {
    let hosts = Hosts::with(&[]).await;
    hosts.declare(false).await.0.unwrap();
    let ran = hosts.this.folder.path().join("ran");
    let go = hosts.this.folder.path().join("go");
    let wait = format!("touch {ran:?}; while ! test -e {go:?}; do sleep 0.01; done");
    hosts.hook("pre-forget.d", &wait);
    let back = async {
        while !ran.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        Hosts::come_back(&hosts.array, None, 77);
        std::fs::write(&go, "").unwrap();
    };
    let (ended, ()) = tokio::join!(hosts.forget(false), back);
    let error = ended.unwrap_err();
    assert!(error.message().contains("has come back meanwhile"), "{error}");
    let key = Key::new(GONE, 77);
    assert!(hosts.array.member(GONE).is_member(key).unwrap());
    assert!(hosts.array.member(THIS).keys().unwrap().contains(&key));
}

#[tokio::test]
async fn a_cell_whose_volumes_wait_here_stays_open_here() {
    let mut hosts = Hosts::with(&["one"]).await;
    let record = super::attachments::Record {
        pool: "one".to_owned(),
        volume: "v".to_owned(),
        ..Default::default()
    };
    hosts.this.control.0.attachments.add(record).await.unwrap();
    let (ended, cells) = hosts.declare(false).await;
    ended.unwrap();
    assert_eq!(outcomes(&cells), [("one", Kept)]);
    assert!(hosts.this.control.pool("one").is_ok());
    assert_eq!(hosts.group().await.dead[0].cells, ["one"]);
}

#[tokio::test]
async fn a_cell_that_was_taken_here_between_two_calls_stays_open_here() {
    let mut hosts = Hosts::with(&["one", "two"]).await;
    hosts.array.before("take one", || false);
    let (ended, cells) = hosts.declare(false).await;
    ended.unwrap_err();
    assert_eq!(outcomes(&cells), [("one", Failed), ("two", Released)]);
    assert_eq!(hosts.take("one").await, ["v"]);
    let (ended, cells) = hosts.declare(false).await;
    assert!(ended.unwrap().changed);
    assert_eq!(outcomes(&cells), [("one", Kept)]);
    assert!(hosts.this.control.pool("one").is_ok(), "a cell in use was closed");
    assert_eq!(hosts.holder("one"), Holder::This);
    assert_eq!(hosts.group().await.dead[0].cells, ["one", "two"]);
    assert!(!hosts.declare(false).await.0.unwrap().changed);
}

/// Hosts whose daemon was stopped when it had opened the cell `one` of the dead host.
async fn stopped_with_an_open_cell() -> Hosts {
    // On a busy machine the call is past it, and closes the cell, before it is stopped.
    for _ in 0..20 {
        let hosts = Hosts::with(&["one"]).await;
        let control = hosts.this.control.clone();
        let mut events = control.events().reader(false, "one".to_owned());
        let is_other = |event: v1::Event| event.kind() != v1::EventKind::CellTaken;
        let stopped = async { while events.next().await.is_some_and(is_other) {} };
        let is_stopped = tokio::select! {
            biased;
            () = stopped => true,
            _ = hosts.declare(false) => false,
        };
        if is_stopped && control.pool("one").is_ok() && hosts.holder("one") == Holder::This {
            return hosts;
        }
    }
    panic!("each call went on too fast");
}

#[tokio::test]
async fn a_cell_that_was_open_when_the_daemon_stopped_is_closed_and_released() {
    for is_taken_here in [false, true] {
        let mut hosts = stopped_with_an_open_cell().await;
        if is_taken_here {
            assert_eq!(hosts.take("one").await, ["v"]);
        }
        let (ended, cells) = hosts.declare(false).await;
        assert!(ended.unwrap().changed);
        // A cell that was taken here since may be in use.
        let (outcome, holder) =
            if is_taken_here { (Kept, Holder::This) } else { (Released, Holder::Free) };
        assert_eq!(outcomes(&cells), [("one", outcome)]);
        assert_eq!(hosts.holder("one"), holder);
        assert!(!hosts.declare(false).await.0.unwrap().changed);
    }
}
