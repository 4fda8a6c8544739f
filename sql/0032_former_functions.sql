-- What no version calls any more that may run beside this one, and what returned something else once.
drop function if exists waybill.is_oldest(text, uuid, uuid), waybill.count_held(text[], uuid[], int[]),
  waybill.release_held(text[], uuid[], int[], int[], interval), waybill.hurry(text, uuid[]),
  waybill.rank_released(uuid[], int[], boolean[], boolean[]);
