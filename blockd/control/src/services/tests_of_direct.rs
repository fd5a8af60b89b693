//! Pools of namespaces by the control API, on a host that is made of files.

use std::sync::Arc;

use blockd_api::v1;
use blockd_pmem::platform::step::Rule;
use blockd_pmem::platform::testing::{FakeHost, FakeSpec};
use blockd_pmem::platform::{PageMap, RegionKey};
use tonic::{Code, Status};

use super::testing::Rig;
use crate::direct::{DirectConfig, SizeRule};

const MIB: i64 = 1 << 20;

struct Memory {
    rig: Rig,
    host: Arc<FakeHost>,
}

impl Memory {
    async fn new(name: &str) -> Self {
        let spec = FakeSpec::new(1, 1 << 10 << 20).at_node(1);
        let memory = Self { rig: Rig::new().await, host: FakeHost::new(&[spec]) };
        let config = DirectConfig {
            name: name.to_owned(),
            region: RegionKey::Cookie(1),
            name_prefix: "b-".to_owned(),
            alignment: Rule::Formula,
            size_rule: SizeRule::Usable,
            page_map: PageMap::Device,
            power_safe: false,
            has_percentage: true,
        };
        memory.rig.control.open_direct(&config, memory.host.platform()).await.unwrap();
        memory
    }

    async fn create(
        &mut self,
        name: &str,
        size_bytes: i64,
    ) -> Result<v1::CreateVolumeResponse, Status> {
        let (name, pool) = (name.to_owned(), "direct".to_owned());
        let asked = v1::CreateVolumeRequest { name, pool, size_bytes, ..Default::default() };
        Ok(self.rig.client.create_volume(asked).await?.into_inner())
    }

    async fn pool(&mut self) -> v1::Pool {
        let asked = v1::GetPoolRequest { name: "direct".to_owned() };
        self.rig.client.get_pool(asked).await.unwrap().into_inner().pool.unwrap()
    }

    async fn volumes(&mut self, pool: &str) -> Vec<v1::Volume> {
        let asked = v1::ListVolumesRequest { pool: pool.to_owned(), brief: true };
        self.rig.client.list_volumes(asked).await.unwrap().into_inner().volumes
    }
}

/// Rows: P1, P49.
#[tokio::test]
async fn volumes_of_both_kinds_of_pools_are_side_by_side() {
    let mut memory = Memory::new("direct").await;
    let made = memory.create("a", 100 * MIB).await.unwrap();
    assert!(made.changed);
    let volume = made.volume.unwrap();
    assert_eq!((volume.size_bytes, volume.charged_bytes), (110 * MIB, 112 * MIB));
    assert_eq!((volume.usage(), volume.dax), (v1::PmemUsage::AppDirect, true));
    assert_eq!(volume.device_path, "/dev/pmem0");
    assert_eq!(
        (volume.durability(), volume.state()),
        (v1::Durability::PowerSafe, v1::VolumeState::Ready)
    );
    assert!(volume.erase_after && !volume.attached);
    assert!(!memory.create("a", 100 * MIB).await.unwrap().changed);

    let pool = memory.pool().await;
    assert_eq!((pool.kind(), pool.state()), (v1::PoolKind::PmemDirect, v1::PoolState::Open));
    assert_eq!((pool.region.as_str(), pool.numa_node), ("0x1", 1));
    assert_eq!((pool.size_bytes, pool.free_bytes), (1024 * MIB, 912 * MIB));
    assert_eq!((pool.largest_volume_bytes, pool.volume_step_bytes), (896 * MIB, 16 * MIB));
    assert_eq!((pool.minimum_volume_bytes, pool.volume_count), (14 * MIB, 1));

    let asked = v1::CreateVolumeRequest { name: "b".into(), size_bytes: MIB, ..Default::default() };
    memory.rig.client.create_volume(asked).await.unwrap();
    let pools = memory.rig.client.list_pools(v1::ListPoolsRequest {}).await.unwrap().into_inner();
    let names: Vec<_> = pools.pools.iter().map(|pool| pool.name.as_str()).collect();
    assert_eq!(names, ["default", "direct"]);
    let names =
        |volumes: Vec<v1::Volume>| volumes.into_iter().map(|one| one.name).collect::<Vec<_>>();
    assert_eq!(names(memory.volumes("").await), ["b", "a"]);
    assert_eq!(names(memory.volumes("direct").await), ["a"]);
    assert_eq!(names(memory.volumes("default").await), ["b"]);
    memory.rig.control.close_pools().await.unwrap();
}

#[tokio::test]
async fn a_call_that_needs_a_map_is_refused_and_names_the_device() {
    let mut memory = Memory::new("direct").await;
    memory.create("a", 64 * MIB).await.unwrap();
    let (name, pool) = ("a".to_owned(), "direct".to_owned());
    let client = &mut memory.rig.client;
    for front_end in [v1::FrontEnd::Nbd, v1::FrontEnd::Ublk, v1::FrontEnd::Unspecified] {
        let front_end = front_end.into();
        let (name, pool) = (name.clone(), pool.clone());
        let asked = v1::AttachVolumeRequest { name, pool, front_end, ..Default::default() };
        let refused = client.attach_volume(asked).await.unwrap_err();
        assert_eq!(refused.code(), Code::FailedPrecondition);
        assert!(refused.message().ends_with("use /dev/pmem0"), "{refused}");
    }
    let member = v1::SnapshotMember { volume: name.clone(), name: "s".to_owned() };
    let asked = v1::CreateSnapshotsRequest {
        pool: pool.clone(),
        members: vec![member],
        ..Default::default()
    };
    let refused = client.create_snapshots(asked).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("is of kind pmem-direct"), "{refused}");
    let asked = v1::ResizeVolumeRequest {
        name: name.clone(),
        pool: pool.clone(),
        size_bytes: 256 * MIB,
        ..Default::default()
    };
    let refused = client.resize_volume(asked).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert!(refused.message().contains("can't grow"), "{refused}");
    let asked = v1::DetachVolumeRequest { name, pool: pool.clone(), force: false };
    assert!(!client.detach_volume(asked).await.unwrap().into_inner().changed);
    let asked = v1::ListConnectionsRequest { pool, volume: "a".to_owned() };
    assert!(client.list_connections(asked).await.unwrap().into_inner().connections.is_empty());
    memory.rig.control.close_pools().await.unwrap();
}

/// Rows: P3, P51.
#[tokio::test]
async fn errors_of_memory_have_codes() {
    let mut memory = Memory::new("direct").await;
    memory.create("a", 64 * MIB).await.unwrap();
    let refused = memory.create("large", 1024 * MIB).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    assert!(refused.message().starts_with("region 0x1: no space"), "{refused}");
    let asked = v1::CreateVolumeRequest {
        name: "limited".to_owned(),
        pool: "direct".to_owned(),
        size_bytes: 64 * MIB,
        limit_bytes: 64 * MIB,
        ..Default::default()
    };
    let refused = memory.rig.client.create_volume(asked).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument);
    assert!(refused.message().starts_with("limit_bytes is 67108864"), "{refused}");
    let delete = || v1::DeleteVolumeRequest {
        name: "a".to_owned(),
        pool: "direct".to_owned(),
        force: true,
        ..Default::default()
    };
    memory.host.mount("pmem0", Some("/mnt/x"));
    let refused = memory.rig.client.delete_volume(delete()).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    assert_eq!(refused.message(), "volume a is in use: mounted at /mnt/x");
    memory.host.mount("pmem0", None);
    let deleted = memory.rig.client.delete_volume(delete()).await.unwrap().into_inner();
    assert!(deleted.changed && deleted.volume.unwrap().erase_after);
    assert!(!memory.rig.client.delete_volume(delete()).await.unwrap().into_inner().changed);
    memory.rig.control.close_pools().await.unwrap();
}

#[tokio::test]
async fn a_region_that_vanishes_fails_its_pool_alone() {
    let mut memory = Memory::new("direct").await;
    memory.create("a", 64 * MIB).await.unwrap();
    memory.rig.control.set_ready();
    assert!(memory.rig.control.is_ready());
    memory.host.remove_region(1);
    assert!(!memory.rig.control.is_ready());
    let pool = memory.pool().await;
    assert_eq!(pool.state(), v1::PoolState::Failed);
    assert!(pool.failure.contains("its region 0x1 is not there"), "{}", pool.failure);
    let volumes = memory.volumes("direct").await;
    assert_eq!((volumes.len(), volumes[0].device_problem.as_str()), (1, "region 0x1 is not there"));
    let refused = memory.create("b", MIB).await.unwrap_err();
    assert_eq!(refused.code(), Code::FailedPrecondition);
    let asked = v1::CreateVolumeRequest { name: "c".into(), size_bytes: MIB, ..Default::default() };
    memory.rig.client.create_volume(asked).await.unwrap();
    memory.rig.control.close_pools().await.unwrap();
}
