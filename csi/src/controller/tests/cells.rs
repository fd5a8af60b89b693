//! Volumes in cells of a volume group that several nodes reach.

use super::*;
use crate::cells::{self, Aim, CellId};
use crate::testing::{MIB, Rig, Rival};
use blockd_api::v1::FrontEnd;

const GROUP: &str = "san";
/// Free space of the group.
const FREE: i64 = 10_240 * MIB;

fn rig() -> Rig {
    let rig = Rig::simple();
    rig.fake.add_group(GROUP, FREE);
    rig
}

fn parameters(group: &str) -> HashMap<String, String> {
    map(&[("volume-group", group)])
}

fn request(name: &str) -> proto::CreateVolumeRequest {
    proto::CreateVolumeRequest { parameters: parameters(GROUP), ..volume_request(name, 64 * MIB) }
}

fn id(service: &Service, volume: &proto::Volume) -> CellId {
    service.plugin.settings.cells.parse(&volume.volume_id).unwrap()
}

async fn create(
    service: &Service,
    request: proto::CreateVolumeRequest,
) -> Result<Response<proto::CreateVolumeResponse>, Status> {
    service.create_volume(Request::new(request)).await
}

async fn bring(service: &Service, id: &CellId, aim: Aim) -> Result<(), crate::error::Error> {
    cells::bring(&service.plugin.daemon, "n1", id, aim).await
}

#[tokio::test]
async fn each_volume_has_a_small_cell_of_its_own_that_all_nodes_of_the_group_reach() {
    let rig = rig();
    let service = rig.controller();
    let mut wanted = request("pvc-1");
    wanted.volume_capabilities = vec![block(Mode::MultiNodeMultiWriter)];
    wanted.parameters.insert("csi.blockd.io/iops".to_owned(), "500".to_owned());
    wanted.parameters.insert("front-end".to_owned(), "nbd".to_owned());
    wanted.capacity_range = range(4096 * MIB, 0);
    let made = make(&service, wanted.clone()).await;
    let cell = id(&service, &made);
    assert_eq!(made.capacity_bytes, 4096 * MIB);
    assert_eq!(made.accessible_topology.len(), 1);
    assert_eq!(made.accessible_topology[0].segments, map(&[("csi.blockd.io/vg.san", "true")]));
    assert_eq!(made.volume_context, map(&[("csi.blockd.io/front-end", "nbd")]));
    // It grows as it is written.
    assert_eq!(rig.fake.cells(GROUP)[&cell.cell].bytes, 1024 * MIB);
    let volume = rig.fake.volume(&cell.cell, &cell.volume).unwrap();
    assert_eq!(volume.settings.unwrap().iops, 500);
    assert_eq!(volume.labels["csi.blockd.io/volume-group"], GROUP);
    assert_eq!(volume.labels["csi.blockd.io/volume-name"], "pvc-1");
    assert!(!volume.labels.contains_key("csi.blockd.io/device-class"));
    assert_eq!(make(&service, wanted).await, made);
    assert_eq!(rig.fake.cells(GROUP).len(), 1);
    assert_ne!(make(&service, request("pvc-2")).await.volume_id, made.volume_id);
    assert_eq!(rig.fake.cells(GROUP).len(), 2);
}

#[tokio::test]
async fn a_class_that_changed_between_two_tries_makes_no_second_cell() {
    let rig = rig();
    rig.fake.add_group("other", FREE);
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    let mut changed = request("pvc-1");
    changed.parameters.insert("csi.blockd.io/iops".to_owned(), "0".to_owned());
    changed.parameters.insert("csi.storage.k8s.io/pvc/name".to_owned(), "data".to_owned());
    assert_eq!(make(&service, changed).await.volume_id, made.volume_id);
    let mut moved = request("pvc-1");
    moved.parameters = parameters("other");
    let (code, text) = refused(create(&service, moved).await);
    assert_eq!(code, Code::AlreadyExists);
    assert!(text.contains("exists with volume-group san, asked for other"), "{text}");
    assert!(rig.fake.cells("other").is_empty());
    // Neither where it is in a pool of a node already.
    make(&service, volume_request("pvc-2", 64 * MIB)).await;
    let (code, text) = refused(create(&service, request("pvc-2")).await);
    assert_eq!((code, text.contains("exists with pool default")), (Code::AlreadyExists, true));
    assert_eq!(rig.fake.cells(GROUP).len(), 1);
}

#[tokio::test]
async fn a_call_that_is_cut_leaves_no_second_cell_and_its_repeat_finishes_it() {
    let mut cuts = 0;
    for done in [false, true] {
        for call in 1.. {
            let rig = rig();
            let service = rig.controller();
            rig.fake.die_at(call, done);
            let answer = create(&service, request("pvc-1")).await;
            let begun = rig.fake.heal();
            if begun && answer.is_err() {
                cuts += 1;
                for cell in rig.fake.cells(GROUP).keys() {
                    // It is repeated on another node: this one has nothing of it.
                    rig.fake.move_cell(GROUP, cell, 2);
                }
            }
            let made = make(&rig.controller(), request("pvc-1")).await;
            assert_eq!(rig.fake.cells(GROUP).len(), 1, "call {call}");
            delete(&service, &made.volume_id).await.unwrap();
            assert!(rig.fake.cells(GROUP).is_empty() && rig.fake.volumes().is_empty());
            if !begun {
                break;
            }
        }
    }
    assert!(cuts > 8, "{cuts}");
}

#[tokio::test]
async fn a_cell_that_was_begun_is_finished_and_one_for_nothing_is_removed() {
    let rig = rig();
    let service = rig.controller();
    let id = service.plugin.settings.cells.id(GROUP, "pvc-1");
    for holder in [0, 1] {
        rig.fake.change_group(GROUP, |group| {
            let begun = crate::testing::Cell {
                bytes: 128 * MIB,
                holder,
                is_begun: true,
                ..Default::default()
            };
            group.cells.insert(id.cell.clone(), begun);
        });
        make(&service, request("pvc-1")).await;
        delete(&service, &id.to_string()).await.unwrap();
        assert!(rig.fake.cells(GROUP).is_empty());
    }
    rig.fake.refuse(Some("create_volume"));
    assert_eq!(refused(create(&service, request("pvc-1")).await).0, Code::FailedPrecondition);
    assert!(rig.fake.cells(GROUP).is_empty(), "the cell of a refused volume stays");
    rig.fake.refuse(Some("configure_volume"));
    assert_eq!(refused(create(&service, request("pvc-1")).await).0, Code::FailedPrecondition);
    assert!(rig.fake.cells(GROUP).is_empty(), "the cell of a refused volume stays");
    // One that was there before is not removed.
    rig.fake.refuse(None);
    make(&service, request("pvc-1")).await;
    let mut larger = request("pvc-1");
    larger.capacity_range = range(128 * MIB, 0);
    assert_eq!(refused(create(&service, larger).await).0, Code::AlreadyExists);
    assert_eq!(rig.fake.cells(GROUP).len(), 1);
}

#[tokio::test]
async fn a_volume_is_deleted_from_any_node_and_never_while_another_uses_it() {
    let rig = rig();
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    let cell = id(&service, &made);
    rig.fake.move_cell(GROUP, &cell.cell, 2);
    let change = |change: fn(&mut crate::testing::Cell)| {
        rig.fake.change_group(GROUP, |group| change(group.cells.get_mut(&cell.cell).unwrap()));
    };
    change(|cell| cell.is_used = true);
    let error = delete(&service, &made.volume_id).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("host 2 refuses"), "{error}");
    // Nor while it is staged here and served there, though nothing uses it there.
    bring(&service, &cell, Aim::Shared(FrontEnd::Ublk)).await.unwrap();
    change(|cell| cell.is_used = false);
    let error = delete(&service, &made.volume_id).await.unwrap_err();
    assert!(error.message().contains("is attached on standby"), "{error}");
    change(|cell| cell.standby = None);
    change(|cell| cell.is_silent = true);
    let error = delete(&service, &made.volume_id).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("blockd node declare-dead san/2"), "{error}");
    change(|cell| cell.is_silent = false);
    bring(&service, &cell, Aim::Alone).await.unwrap();
    rig.fake.change(&cell.cell, &cell.volume, |volume| volume.attached = true);
    let error = delete(&service, &made.volume_id).await.unwrap_err();
    assert!(error.message().contains("is attached"), "{error}");
    rig.fake.change(&cell.cell, &cell.volume, |volume| volume.attached = false);
    rig.fake.move_cell(GROUP, &cell.cell, 2);
    for _ in 0..2 {
        delete(&service, &made.volume_id).await.unwrap();
        assert!(rig.fake.cells(GROUP).is_empty() && rig.fake.volumes().is_empty());
    }
}

#[tokio::test]
async fn a_cell_that_another_node_deletes_meanwhile_is_not_made_again() {
    for holder in [0, 2] {
        let rig = rig();
        let service = rig.controller();
        let made = make(&service, request("pvc-1")).await;
        let cell = id(&service, &made);
        rig.fake.move_cell(GROUP, &cell.cell, holder);
        rig.fake.before("take_cell", Rival::Deletes);
        let error = bring(&service, &cell, Aim::Alone).await.unwrap_err();
        assert_eq!((error.code(), rig.fake.cells(GROUP).len()), (Code::NotFound, 0));
        // Neither one that was begun.
        for call in ["take_cell", "create_cell"] {
            make(&service, request("pvc-1")).await;
            rig.fake.move_cell(GROUP, &cell.cell, 0);
            rig.fake.change_group(GROUP, |group| {
                group.cells.get_mut(&cell.cell).unwrap().is_begun = true;
            });
            rig.fake.refuse(Some("take_cell"));
            rig.fake.before(call, Rival::Deletes);
            bring(&service, &cell, Aim::Alone).await.unwrap_err();
            assert!(rig.fake.cells(GROUP).is_empty(), "{call}");
            rig.fake.refuse(None);
        }
    }
}

#[tokio::test]
async fn a_volume_that_another_node_deletes_or_takes_meanwhile() {
    for call in ["take_cell", "delete_volume", "delete_cell"] {
        let rig = rig();
        let service = rig.controller();
        let made = make(&service, request("pvc-1")).await;
        let prepare = || {
            if call == "take_cell" {
                rig.fake.move_cell(GROUP, &id(&service, &made).cell, 2);
            }
        };
        prepare();
        rig.fake.before(call, Rival::Deletes);
        delete(&service, &made.volume_id).await.unwrap();
        assert!(rig.fake.cells(GROUP).is_empty(), "{call}");
        make(&service, request("pvc-1")).await;
        prepare();
        rig.fake.before(call, Rival::Takes);
        let error = delete(&service, &made.volume_id).await.unwrap_err();
        let expected = if call == "take_cell" { Code::FailedPrecondition } else { Code::Aborted };
        assert_eq!(error.code(), expected, "{call}: {error}");
        assert_eq!(rig.fake.cells(GROUP).len(), 1, "{call}");
    }
}

#[tokio::test]
async fn a_call_that_leaves_a_cell_is_to_be_repeated() {
    let rig = rig();
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    let cell = id(&service, &made).cell;
    rig.fake.move_cell(GROUP, &cell, 2);
    rig.fake.change_group(GROUP, |group| group.cells.get_mut(&cell).unwrap().is_silent = true);
    let (code, text) = refused(create(&service, request("pvc-1")).await);
    assert_eq!((code, text.contains("has a cell already")), (Code::Aborted, true), "{text}");
    rig.fake.change_group(GROUP, |group| group.cells.clear());
    // One without a volume is removed, whichever call has made it.
    rig.fake.change_group(GROUP, |group| {
        let begun = crate::testing::Cell { bytes: MIB, is_begun: true, ..Default::default() };
        group.cells.insert(cell.clone(), begun);
    });
    rig.fake.remove(&cell, &id(&service, &made).volume);
    rig.fake.refuse(Some("create_volume"));
    assert_eq!(refused(create(&service, request("pvc-1")).await).0, Code::FailedPrecondition);
    assert!(rig.fake.cells(GROUP).is_empty());
}

#[tokio::test]
async fn a_node_without_the_group_leaves_the_volume_to_another_one() {
    let rig = Rig::simple();
    let service = rig.controller();
    let (code, text) = refused(create(&service, request("pvc-1")).await);
    assert_eq!(code, Code::ResourceExhausted);
    assert!(text.contains("volume group san") && text.contains("blockd vg add"), "{text}");
}

#[tokio::test]
async fn another_group_that_does_not_answer_is_not_taken_for_an_empty_one() {
    let rig = rig();
    rig.fake.add_group("other", FREE);
    rig.fake.change_group("other", |group| group.failure = "hangs".to_owned());
    let service = rig.controller();
    let (code, text) = refused(create(&service, request("pvc-1")).await);
    assert_eq!((code, text.contains("volume group other: hangs")), (Code::Unavailable, true));
    assert!(rig.fake.cells(GROUP).is_empty());
}

#[tokio::test]
async fn a_pool_that_failed_ends_no_call_and_stops_none_whose_cell_is_there() {
    let classes = "[[class]]\nname = 'a'\ndefault = true\n\
                   [[class]]\nname = 'b'\npool = 'other'\n";
    let rig = Rig::new(&[("default", 1024 * MIB), ("other", 1024 * MIB)], classes);
    rig.fake.add_group(GROUP, FREE);
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    rig.fake.fail_pool("other", true);
    // As a call does that was late, and is repeated.
    assert_eq!(make(&service, request("pvc-1")).await, made);
    let (code, text) = refused(create(&service, request("pvc-2")).await);
    assert_eq!(code, Code::Unavailable);
    assert!(text.contains("pool other may have a volume of that name"), "{text}");
    assert_eq!(rig.fake.cells(GROUP).len(), 1);
    rig.fake.fail_pool("other", false);
    make(&service, request("pvc-2")).await;
}

#[tokio::test]
async fn cells_of_another_cluster_are_not_seen_and_not_deleted() {
    let rig = rig();
    let other = crate::cells::Cells::new("csi.blockd.io", "second").id(GROUP, "pvc-1");
    rig.fake.change_group(GROUP, |group| {
        let there = crate::testing::Cell { bytes: MIB, holder: 2, ..Default::default() };
        group.cells.insert(other.cell.clone(), there);
    });
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    assert_ne!(id(&service, &made).cell, other.cell);
    assert_eq!(list(&service).await, [made.volume_id.as_str()]);
    delete(&service, &other.to_string()).await.unwrap();
    delete(&service, &made.volume_id).await.unwrap();
    assert_eq!(rig.fake.cells(GROUP).into_keys().collect::<Vec<_>>(), [other.cell]);
}

async fn list(service: &Service) -> Vec<String> {
    let answer = service.list_volumes(Request::new(Default::default())).await.unwrap();
    let entries = answer.into_inner().entries.into_iter();
    entries.map(|entry| entry.volume.unwrap().volume_id).collect()
}

#[tokio::test]
async fn volumes_whose_cell_is_elsewhere_are_listed_found_and_confirmed() {
    let rig = rig();
    let service = rig.controller();
    let here = make(&service, request("pvc-1")).await;
    let there = make(&service, request("pvc-2")).await;
    make(&service, volume_request("pvc-3", 8 * MIB)).await;
    rig.fake.move_cell(GROUP, &id(&service, &there).cell, 2);
    let mut all = ["default/csi.pvc-3", &here.volume_id, &there.volume_id];
    all.sort_unstable();
    assert_eq!(list(&service).await, all);
    let get = async |id: &str| {
        let volume_id = id.to_owned();
        let request = Request::new(proto::ControllerGetVolumeRequest { volume_id });
        service.controller_get_volume(request).await.map(Response::into_inner)
    };
    let found = get(&here.volume_id).await.unwrap();
    let volume = found.volume.unwrap();
    assert_eq!((&volume.volume_id, volume.capacity_bytes), (&here.volume_id, 64 * MIB));
    assert_eq!(volume.accessible_topology, here.accessible_topology);
    let found = get(&there.volume_id).await.unwrap();
    let condition = found.status.unwrap().volume_condition.unwrap();
    assert!(!condition.abnormal && condition.message.contains("on host 2"), "{condition:?}");
    let volume = found.volume.unwrap();
    assert_eq!((&volume.volume_id, volume.capacity_bytes), (&there.volume_id, 0));
    assert_eq!(volume.accessible_topology, there.accessible_topology);
    let mut asked = proto::ValidateVolumeCapabilitiesRequest {
        volume_id: there.volume_id.clone(),
        volume_capabilities: vec![block(Mode::MultiNodeMultiWriter)],
        ..Default::default()
    };
    let validate = async |asked: &proto::ValidateVolumeCapabilitiesRequest| {
        let answer = service.validate_volume_capabilities(Request::new(asked.clone())).await;
        answer.unwrap().into_inner()
    };
    assert!(validate(&asked).await.confirmed.is_some());
    asked.volume_capabilities = vec![mount(Mode::MultiNodeMultiWriter)];
    assert!(validate(&asked).await.message.contains("H14"));
    // A pool that failed here is no loss of the volume.
    let cell = id(&service, &here).cell;
    rig.fake.fail_pool(&cell, true);
    let condition = get(&here.volume_id).await.unwrap().status.unwrap().volume_condition.unwrap();
    assert!(condition.abnormal && condition.message.contains("is not open"), "{condition:?}");
    assert_eq!(list(&service).await, all);
    rig.fake.fail_pool(&cell, false);
    let gone = service.plugin.settings.cells.id(GROUP, "none").to_string();
    assert_eq!(get(&gone).await.unwrap_err().code(), Code::NotFound);
    // A group that can't be used hides nothing that is open here.
    rig.fake.change_group(GROUP, |group| group.failure = "hangs".to_owned());
    assert!(get(&here.volume_id).await.is_ok());
    let error = get(&there.volume_id).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    assert!(error.message().contains("volume group san: hangs"), "{error}");
    let mut all = ["default/csi.pvc-3", &here.volume_id];
    all.sort_unstable();
    assert_eq!(list(&service).await, all);
    let error = delete(&service, &there.volume_id).await.unwrap_err();
    assert_eq!(error.code(), Code::Unavailable);
    // A node that does not have the group can't say that it is gone.
    let foreign = service.plugin.settings.cells.id("none", "pvc-1").to_string();
    let error = delete(&service, &foreign).await.unwrap_err();
    assert_eq!(error.code(), Code::FailedPrecondition);
    assert!(error.message().contains("volume group none is not known to the daemon of node n1"));
}

#[tokio::test]
async fn a_list_has_the_condition_that_each_volume_has_by_itself() {
    let rig = rig();
    let service = rig.controller();
    let mut all = Vec::new();
    for name in ["here", "there", "free", "failed"] {
        all.push(make(&service, request(name)).await.volume_id);
    }
    let cell = |at: usize| service.plugin.settings.cells.parse(&all[at]).unwrap().cell;
    rig.fake.move_cell(GROUP, &cell(1), 2);
    rig.fake.move_cell(GROUP, &cell(2), 0);
    rig.fake.fail_pool(&cell(3), true);
    let list = service.list_volumes(Request::new(Default::default())).await.unwrap().into_inner();
    let listed = |id: &String| {
        let of_it = |entry: &&proto::list_volumes_response::Entry| {
            entry.volume.as_ref().is_some_and(|volume| volume.volume_id == *id)
        };
        let entry = list.entries.iter().find(of_it).unwrap();
        entry.status.clone().unwrap().volume_condition.unwrap()
    };
    for (id, message) in all.iter().zip([
        "healthy",
        "unknown: its cell is on host 2",
        "unknown: its cell is open on no host",
        "its cell is not open",
    ]) {
        let request = proto::ControllerGetVolumeRequest { volume_id: id.clone() };
        let found = service.controller_get_volume(Request::new(request)).await.unwrap();
        let condition = found.into_inner().status.unwrap().volume_condition.unwrap();
        assert_eq!((listed(id), condition.message.as_str()), (condition.clone(), message));
    }
}

#[tokio::test]
async fn the_capacity_is_the_free_space_of_the_group() {
    let rig = rig();
    let service = rig.controller();
    let capacity = async |group: &str, segments: Option<&[(&str, &str)]>, list: Vec<_>| {
        let request = proto::GetCapacityRequest {
            volume_capabilities: list,
            parameters: parameters(group),
            accessible_topology: segments.map(|it| proto::Topology { segments: map(it) }),
        };
        let answer = service.get_capacity(Request::new(request)).await;
        answer.map(|answer| answer.into_inner().available_capacity)
    };
    assert_eq!(capacity(GROUP, None, vec![]).await.unwrap(), FREE);
    make(&service, request("pvc-1")).await;
    let free = FREE - 128 * MIB;
    let node = ("csi.blockd.io/node", "n1");
    let there = ("csi.blockd.io/node", "n2");
    let group = ("csi.blockd.io/vg.san", "true");
    for (segments, expected) in [
        (&[group][..], free),
        (&[node, group], free),
        (&[there, group], free),
        (&[node], free),
        (&[there], 0),
        (&[("csi.blockd.io/vg.other", "true")], 0),
    ] {
        assert_eq!(capacity(GROUP, Some(segments), vec![]).await.unwrap(), expected);
    }
    let shared = vec![block(Mode::MultiNodeMultiWriter)];
    assert_eq!(capacity(GROUP, None, shared).await.unwrap(), free);
    let mounted = vec![mount(Mode::MultiNodeMultiWriter)];
    assert_eq!(capacity(GROUP, None, mounted).await.unwrap(), 0);
    assert_eq!(capacity("none", None, vec![]).await.unwrap(), 0);
    let mut large = request("pvc-2");
    large.capacity_range = range(FREE, 0);
    let (code, text) = refused(create(&service, large).await);
    assert_eq!(code, Code::ResourceExhausted);
    assert!(text.contains(&format!("{free} bytes free")), "{text}");
    rig.fake.change_group(GROUP, |group| group.failure = "hangs".to_owned());
    assert_eq!(capacity(GROUP, None, vec![]).await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn topologies_of_other_nodes_are_met_by_the_group() {
    let rig = rig();
    let service = rig.controller();
    let wanted = |segments: &[(&str, &str)]| {
        let requisite = vec![proto::Topology { segments: map(segments) }];
        Some(proto::TopologyRequirement { preferred: requisite.clone(), requisite })
    };
    let (there, group) = (("csi.blockd.io/node", "n2"), ("csi.blockd.io/vg.san", "true"));
    let mut asked = request("pvc-1");
    for segments in [&[there, group][..], &[group]] {
        asked.accessibility_requirements = wanted(segments);
        make(&service, asked.clone()).await;
    }
    asked.accessibility_requirements = wanted(&[there]);
    assert_eq!(refused(create(&service, asked).await).0, Code::ResourceExhausted);
    // A volume of a pool is on this node alone, whatever groups it has.
    let mut usual = volume_request("pvc-2", 8 * MIB);
    usual.accessibility_requirements = wanted(&[there, group]);
    assert_eq!(refused(create(&service, usual.clone()).await).0, Code::ResourceExhausted);
    usual.accessibility_requirements = wanted(&[("csi.blockd.io/node", "n1"), group]);
    make(&service, usual).await;
}

#[tokio::test]
async fn a_volume_grows_where_it_is_and_is_left_to_the_node_that_uses_it() {
    let rig = rig();
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    let cell = id(&service, &made);
    let expand = async |mib: i64| {
        let request = proto::ControllerExpandVolumeRequest {
            volume_id: made.volume_id.clone(),
            capacity_range: range(mib * MIB, 0),
            volume_capability: Some(block(Mode::MultiNodeMultiWriter)),
            ..Default::default()
        };
        let answer = service.controller_expand_volume(Request::new(request)).await.unwrap();
        let answer = answer.into_inner();
        (answer.capacity_bytes / MIB, answer.node_expansion_required)
    };
    // Larger than its cell.
    assert_eq!(expand(4096).await, (4096, false));
    assert_eq!(expand(4096).await, (4096, false));
    for holder in [0, 2] {
        rig.fake.move_cell(GROUP, &cell.cell, holder);
        let mib = 5000 + i64::from(holder);
        assert_eq!(expand(mib).await, (mib, false));
    }
    rig.fake.move_cell(GROUP, &cell.cell, 2);
    rig.fake.change_group(GROUP, |group| {
        group.cells.get_mut(&cell.cell).unwrap().is_used = true;
    });
    assert_eq!(expand(6000).await, (6000, true));
    let size = rig.fake.volume(&cell.cell, &cell.volume).unwrap().size_bytes;
    assert_eq!(size, 5002 * MIB);
    // Another cause is none of a node that uses it.
    rig.fake.refuse(Some("take_cell"));
    let request = proto::ControllerExpandVolumeRequest {
        volume_id: made.volume_id.clone(),
        capacity_range: range(6000 * MIB, 0),
        volume_capability: Some(block(Mode::MultiNodeMultiWriter)),
        ..Default::default()
    };
    let answer = service.controller_expand_volume(Request::new(request)).await;
    assert_eq!(answer.unwrap_err().code(), Code::FailedPrecondition);
}

#[tokio::test]
async fn a_cell_comes_to_the_node_that_uses_its_volume_alone() {
    let rig = rig();
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    let cell = id(&service, &made);
    let holder = || rig.fake.cells(GROUP)[&cell.cell].holder;
    let change = |change: fn(&mut crate::testing::Cell)| {
        rig.fake.change_group(GROUP, |group| change(group.cells.get_mut(&cell.cell).unwrap()));
    };
    // One that is here is not asked the group for.
    rig.fake.take_log();
    rig.fake.change_group(GROUP, |group| group.failure = "hangs".to_owned());
    bring(&service, &cell, Aim::Alone).await.unwrap();
    assert_eq!(rig.fake.take_log(), ["get_volume"]);
    rig.fake.change_group(GROUP, |group| group.failure.clear());
    for from in [0, 2] {
        rig.fake.move_cell(GROUP, &cell.cell, from);
        bring(&service, &cell, Aim::Alone).await.unwrap();
        assert_eq!(holder(), 1);
    }
    rig.fake.move_cell(GROUP, &cell.cell, 2);
    change(|cell| cell.is_used = true);
    let error = bring(&service, &cell, Aim::Alone).await.unwrap_err();
    assert_eq!((error.code(), holder()), (Code::FailedPrecondition, 2));
    // Shared it is attached, and stays where it is.
    for _ in 0..2 {
        bring(&service, &cell, Aim::Shared(FrontEnd::Nbd)).await.unwrap();
    }
    assert_eq!((rig.fake.cells(GROUP)[&cell.cell].standby.is_some(), holder()), (true, 2));
    // On standby is not here: to be used alone the cell has to come.
    assert!(bring(&service, &cell, Aim::Alone).await.is_err());
    change(|cell| cell.is_used = false);
    bring(&service, &cell, Aim::Alone).await.unwrap();
    assert_eq!(holder(), 1);
    // Shared and used by no other node, it comes.
    change(|cell| cell.standby = None);
    for from in [0, 2] {
        rig.fake.move_cell(GROUP, &cell.cell, from);
        bring(&service, &cell, Aim::Shared(FrontEnd::Nbd)).await.unwrap();
        assert_eq!((rig.fake.cells(GROUP)[&cell.cell].standby.is_some(), holder()), (false, 1));
    }
    // That a node does not answer is not that it keeps the cell.
    rig.fake.move_cell(GROUP, &cell.cell, 2);
    change(|cell| cell.is_silent = true);
    let error = bring(&service, &cell, Aim::Shared(FrontEnd::Nbd)).await.unwrap_err();
    assert!(error.to_string().contains("declare-dead"), "{error}");
    let gone = service.plugin.settings.cells.id(GROUP, "none");
    let error = bring(&service, &gone, Aim::Alone).await.unwrap_err();
    assert_eq!(error.code(), Code::NotFound);
}

#[tokio::test]
async fn what_a_cell_cannot_have_is_refused_by_name() {
    let rig = rig();
    let service = rig.controller();
    let made = make(&service, request("pvc-1")).await;
    let asked = proto::CreateSnapshotRequest {
        source_volume_id: made.volume_id.clone(),
        name: "s".to_owned(),
        ..Default::default()
    };
    let (code, text) = refused(service.create_snapshot(Request::new(asked)).await);
    assert_eq!(code, Code::FailedPrecondition);
    assert!(text.contains("cell of its own") && text.contains("blockd snapshot"), "{text}");
    let mut clone = volume_request("pvc-2", 64 * MIB);
    clone.volume_content_source = from_volume(&made.volume_id);
    assert!(refused(create(&service, clone).await).1.contains("clones through CSI"));
    let mut clone = request("pvc-2");
    clone.volume_content_source = from_volume(&made.volume_id);
    assert!(refused(create(&service, clone).await).1.starts_with("volume_content_source is given"));
    let mut shared = request("pvc-2");
    shared.volume_capabilities = vec![mount(Mode::MultiNodeMultiWriter)];
    let (code, text) = refused(create(&service, shared.clone()).await);
    assert_eq!((code, text.contains("H14")), (Code::InvalidArgument, true));
    shared.volume_capabilities = vec![block(Mode::MultiNodeMultiWriter)];
    shared.parameters.insert("encryption".to_owned(), "luks2".to_owned());
    assert!(refused(create(&service, shared).await).1.starts_with("encryption is luks2"));
    let mut one_node = volume_request("pvc-2", 64 * MIB);
    one_node.volume_capabilities = vec![block(Mode::MultiNodeMultiWriter)];
    assert!(refused(create(&service, one_node).await).1.contains("volumes are of one node"));
    let mut nbd = request("pvc-2");
    nbd.parameters.insert("front-end".to_owned(), "nbd".to_owned());
    nbd.volume_capabilities = vec![mount(Mode::SingleNodeWriter)];
    assert!(refused(create(&service, nbd).await).1.contains("front-end: nbd"));
    let modify = proto::ControllerModifyVolumeRequest {
        volume_id: made.volume_id,
        mutable_parameters: map(&[("csi.blockd.io/reservation", "1Gi")]),
        ..Default::default()
    };
    let (_, text) = refused(service.controller_modify_volume(Request::new(modify.clone())).await);
    assert!(text.starts_with("csi.blockd.io/reservation is given"), "{text}");
    let mutable_parameters = map(&[("csi.blockd.io/iops", "7")]);
    let modify = proto::ControllerModifyVolumeRequest { mutable_parameters, ..modify };
    service.controller_modify_volume(Request::new(modify)).await.unwrap();
    assert_eq!(rig.fake.cells(GROUP).len(), 1);
}
